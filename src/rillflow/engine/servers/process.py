"""A server's process: in a group of its own, its words in a file, and never left behind.

Invariants: the group is killed when this process ends, however it ends (`engine.reaper`); `stop` returns once the group
is gone, so that another one finds the memory that this one held free.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rillflow.engine.reaper import Reaper, kill_group

_GENTLE_SECONDS = 5.0  # to end by itself, and what it has started, before it is killed
_ORPHANS_SECONDS = 1.0  # for what it has started to end after it
_KILLED_SECONDS = 10.0  # for the kernel to take a process away: a GPU's driver may hold it up
_LOOK_SECONDS = 0.02
_TAIL_BYTES = 4000


class ServerProcess:
    """One run of the server; another one is another object."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reaper = Reaper()

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as words:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        self._reaper.watch(self._process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        if self._process is None:
            return
        group = self._process.pid
        if self.running:
            with suppress(ProcessLookupError):
                self._process.terminate()  # it ends what it has started, in its own order
            await self._ended(_GENTLE_SECONDS)
        if not await _gone(group, 0.0 if self.running else _ORPHANS_SECONDS):
            kill_group(group)
            await self._ended(_KILLED_SECONDS)
            await _gone(group, _KILLED_SECONDS)
        self._reaper.forget(group)
        self._reaper.close()

    async def _ended(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()

    def tail(self) -> str:
        """The last lines of its log, for people who ask why it does not serve."""
        try:
            with open(self.log, "rb") as words:
                words.seek(max(0, os.path.getsize(self.log) - _TAIL_BYTES))
                data = words.read()
        except OSError:
            return ""
        return "\n".join(data.decode(errors="replace").splitlines()[-15:])


async def _gone(group: int, seconds: float) -> bool:
    """Whether nothing of a group is left, after so long at most."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    try:
        while True:
            os.killpg(group, 0)
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
    except ProcessLookupError:
        return True


def free_port() -> int:
    """A port of loopback that is free now; who starts a server on it tries again where another took it meanwhile."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
