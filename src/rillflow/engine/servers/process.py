"""A server's process: in a group of its own, its words in a file, and never left behind.

Invariants: the group is killed when this process ends, however it ends (`engine.reaper`); `stop` returns once the group
is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rillflow.engine.reaper import Reaper, kill_group

_GENTLE_SECONDS = 5.0  # to end by itself before it is killed
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
                os.killpg(group, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GENTLE_SECONDS):
                    await self._process.wait()
        kill_group(group)  # what it has started may outlive it
        await self._process.wait()
        self._reaper.forget(group)
        self._reaper.close()

    def tail(self) -> str:
        """The last lines of its log, for people who ask why it does not serve."""
        try:
            data = self.log.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return ""
        return "\n".join(data.decode(errors="replace").splitlines()[-15:])


def free_port() -> int:
    """A port of loopback that is free now; who starts a server on it tries again where another took it meanwhile."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
