"""Running a whole program in a sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import PurePosixPath

from rillflow.agents.sandbox.box import Box, Left
from rillflow.agents.sandbox.interface import Result, Status
from rillflow.agents.sandbox.pool import Pool
from rillflow.errors import SandboxError

_SAID: dict[str, Status] = {"ok": "ok", "error": "error", "exit": "exit", "memory": "memory"}
_SIGXCPU = -24


async def run_program(pool: Pool, code: str, stdin: str, seconds: float, files: Mapping[str, str]) -> Result:
    """Return what the program wrote and how it ended."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise SandboxError(f"{name!r} is not a valid file name in a sandbox", "give paths relative to its folder")
    async with pool.boxes(1) as (box,):
        started = time.monotonic()
        said: object = None
        late = False
        try:
            async with asyncio.timeout(seconds):
                await box.task("program", seconds, code=code, stdin=stdin, files=dict(files))
                said = await box.hear()
        except TimeoutError:
            late = True
        except Left:
            pass  # it closed or misused its channel; its end is observed from outside
        left = 0.0 if late else max(seconds - (time.monotonic() - started), 0.001)
        ended = await _end(box, left)
        taken = time.monotonic() - started
        stdout, stderr = box.texts()
        status = "timeout" if late or ended is None else _status(box, said, ended)
        value = said.get("value") if status == "ok" and isinstance(said, dict) else None
        code_ = await box.end()
        return Result(stdout, stderr, value if isinstance(value, str) else None, status, code_, taken)


async def _end(box: Box, within: float) -> int | None:
    """Return the exit code, or None if the program had to be killed (threads or exit handlers did not stop)."""
    waiting = asyncio.ensure_future(box.end(within))
    done, _ = await asyncio.wait([waiting], timeout=within)
    if done:
        return waiting.result()
    box.kill()
    await waiting
    return None


def _status(box: Box, said: object, code: int) -> Status:
    if box.overflowed:
        return "output"
    word = said.get("status") if isinstance(said, dict) else None  # the code inside may have sent anything
    if isinstance(word, str) and word in _SAID and code >= 0:
        return _SAID[word]
    if code == _SIGXCPU:
        return "timeout"
    return "killed" if code < 0 else "exit"
