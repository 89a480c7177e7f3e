"""Rollout nodes by the user's shell commands: Slurm, Kubernetes, ssh.

In a command {node}, {url} and {token_file} stand for their values, quoted for the shell; everything else, including
other braces, stays as it is. A command has a deadline, after which its process group is killed. Between two commands
the user's scheduler is responsible for the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rillflow.errors import RunError
from rillflow.resources.executors.local import Kept, KeptNodes

log = logging.getLogger(__name__)

DEADLINE = 60.0
_PLACES = re.compile(r"\{(node|url|token_file)\}")
_TAIL = 2000  # characters of a command's output that an error shows
_LAST = 5.0  # seconds for a killed command to be gone


class CommandExecutor:
    """Starts and stops nodes by commands. Without `alive` every started node counts as running until it is stopped; a
    failed node then shows only by not joining, or by missing heartbeats."""

    def __init__(
        self,
        root: Path,
        *,
        start: str,
        stop: str,
        alive: str | None,
        url: str,
        token_file: Path,
        deadline: float = DEADLINE,
    ) -> None:
        self._start, self._stop, self._alive = start, stop, alive
        self._values = {"url": url, "token_file": str(token_file)}
        self._root, self._deadline = root, deadline
        self._kept = KeptNodes(root / "maintainer-nodes.json")

    async def start(self, node: str) -> None:
        if node in self._kept.all():
            raise RunError(f"{node} was started before", "give every node a name of its own")
        self._kept.keep(node, Kept())
        code, said = await self._run(self._start, node)
        if code != 0:
            raise RunError(f"the command that starts {node} ended with code {code}: {said}", _hint("start"))

    async def stop(self, node: str) -> None:
        if node not in self._kept.all():
            return
        if self._alive is None or await self._lives(node):
            code, said = await self._run(self._stop, node)
            if code != 0 and (self._alive is None or await self._lives(node)):
                raise RunError(f"the command that ends {node} ended with code {code}: {said}", _hint("stop"))
        self._kept.forget(node)

    async def nodes(self) -> dict[str, bool]:
        names = list(self._kept.all())
        if self._alive is None:
            return dict.fromkeys(names, True)
        return {name: await self._lives(name) for name in names}

    async def close(self) -> None:
        """Release nothing: the nodes run on."""

    async def _lives(self, node: str) -> bool:
        assert self._alive is not None
        return (await self._run(self._alive, node))[0] == 0

    async def _run(self, template: str, node: str) -> tuple[int, str]:
        """Return its exit code and the end of its output."""
        command = filled(template, {**self._values, "node": node})
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._root,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._deadline):
                output, _ = await process.communicate()
        except TimeoutError:
            raise RunError(
                f"`{command}` was still running after {self._deadline:.0f} s",
                "it must return once the scheduler has taken the job, not when the node ends",
            ) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST):
                        await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace").strip()[-_TAIL:]


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return the command with the values filled in, each quoted as one shell word."""
    return _PLACES.sub(lambda place: shlex.quote(values[place[1]]), template)


def _hint(which: str) -> str:
    return f"try it by hand; it is resources.scaling.{which} of the recipe"
