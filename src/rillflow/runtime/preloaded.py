"""The supervisor's side of the fork server: starts it, asks it for processes, and replaces it when it has died.

Invariants: a request is answered by a running process or by None, and then the caller starts a plain one; a code that
`wait` returns was reported by the kernel to the process's parent. Processes of a fork server that died are killed, and
their code is not known.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rillflow.runtime import warm
from rillflow.runtime.warm import COMMAND, SHARED_MODULES, EarlyServer, server_environment

log = logging.getLogger(__name__)

# What each role imports besides `SHARED_MODULES`. The server imports the modules of a role when the first process of
# that role is asked for: the trainer loads its model while the server imports the node's modules.
ROLE_MODULES: dict[str, tuple[str, ...]] = {
    "trainer": ("rillflow.trainer.main",),
    "rollout": ("rillflow.rollout.main",),
    "engine": ("rillflow.engine.main",),
}
_REPLACEMENTS = 3  # of fork servers that died; then processes are started without one
_PATIENCE = 120.0  # seconds for a fork server to import everything and fork
_MOST = 1 << 20  # bytes of one message


class Forked:
    """A process that the fork server has forked. As of `asyncio.subprocess.Process`: `pid`, `returncode`, `wait`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.lost = False
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        """Wait for the process to end and return its code; None if that is unknown."""
        await self._ended.wait()
        return self.returncode

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def lose(self) -> None:
        """End a process whose parent has died: it was sent SIGTERM, and is not waited for."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.lost = True
        self._ended.set()


class Preloaded:
    """Starts processes by a fork server, which begins to import as soon as `begin` is called, or has begun: `early`."""

    def __init__(
        self,
        run: Path,
        log_path: Path,
        threads: int,
        modules: Sequence[str] = SHARED_MODULES,
        early: EarlyServer | None = None,
    ) -> None:
        self._early = early
        self._run = run
        self._log_path = log_path
        self._modules = modules
        self._threads = threads
        self._connection: _Connection | None = None
        self._beginning: asyncio.Task[_Connection | None] | None = None
        self._left = _REPLACEMENTS
        self._closed = False

    def begin(self) -> None:
        """Start the fork server. Until it has imported what a request needs, the request waits."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._connect(), name="fork server")

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> Forked | None:
        """Fork a process that runs `rillflow ARGUMENTS`; None where it has to be started without the fork server."""
        connection = await self._connected()
        if connection is None:
            return None
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log_path)}
        connection.send({"run": str(self._run), "modules": list(ROLE_MODULES.get(arguments[0], ()))})
        try:
            async with asyncio.timeout(_PATIENCE):
                return await connection.ask(request)
        except (_Refused, TimeoutError) as error:
            log.warning("the fork server did not start %s: %s", " ".join(arguments[:1]), error or "no answer in time")
            return None

    async def close(self) -> None:
        """End the fork server, and with it what it has forked."""
        self._closed = True
        if self._beginning is not None:
            connection = await self._beginning
            if connection is not None:
                await connection.close()

    async def _connected(self) -> _Connection | None:
        if self._closed or self._beginning is None:
            return None
        beginning = self._beginning
        connection = await asyncio.shield(beginning)
        if connection is not None and connection.lost and self._left and connection.has_forked:
            await connection.close()
            if self._beginning is beginning:  # it has not been replaced meanwhile
                self._left -= 1
                log.warning("the fork server has died: starting another")
                self._beginning = asyncio.create_task(self._connect(), name="fork server")
            return await self._connected()
        return None if connection is None or connection.lost else connection

    async def _connect(self) -> _Connection | None:
        try:
            process, own = await self._server()
            reader, writer = await asyncio.open_connection(sock=own, limit=_MOST)
        except OSError as error:
            log.warning("cannot start a fork server: %s", error)
            return None
        connection = _Connection(process, reader, writer)
        connection.send({"run": str(self._run), "modules": list(self._modules)})
        return connection

    async def _server(self) -> tuple[_Ends, socket.socket]:
        """Return a fork server and the socket that it serves: the early one, one of the warm process, or a new one."""
        if self._early is not None:
            early, self._early = self._early.take(self._log_path), None
            return _Adopted(early.process.pid, early.process.wait), early.channel
        own, its = socket.socketpair()
        environment = server_environment(self._threads)
        try:
            with its, open(self._log_path, "ab") as output:
                pid = await asyncio.to_thread(warm.fork_server, its, environment, self._log_path)
                if pid is not None:
                    return _Adopted(pid), own
                started = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    stdin=its.fileno(),
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
                return started, own
        except OSError:
            own.close()
            raise


class _Ends(Protocol):
    """A process that can be waited for and killed."""

    def kill(self) -> None: ...
    async def wait(self) -> int | None: ...


class _Adopted:
    """A fork server that asyncio has not started: the early one, or one that the warm process has forked. Its code is
    not known. `reap` is called once it has ended, where it is a child of this process."""

    def __init__(self, pid: int, reap: Callable[[], object] = lambda: None) -> None:
        self._reap = reap
        self._watched = os.pidfd_open(pid)  # OSError where it has ended already

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    async def wait(self) -> int | None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._watched)
        os.close(self._watched)
        self._reap()
        return None


class _Refused(Exception):
    """Nothing was forked."""


class _Connection:
    """One fork server, from its start to its end."""

    def __init__(self, process: _Ends, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lost = False
        self.has_forked = False
        self._process, self._reader, self._writer = process, reader, writer
        self._asked: dict[int, asyncio.Future[Forked]] = {}
        self._running: dict[int, Forked] = {}
        self._number = 0
        self._listening = asyncio.create_task(self._listen(), name="fork server's words")

    async def ask(self, request: Mapping[str, Any]) -> Forked:
        if self.lost:
            raise _Refused("it has died")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self.send({"id": number, **request})
            return await answer
        except BaseException:
            self.send({"kill": number})
            raise
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:  # it is importing
            self._process.kill()
            await self._process.wait()
        await self._listening

    def send(self, message: Mapping[str, Any]) -> None:
        if not self.lost and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                self._heed(json.loads(line))
        except (OSError, ValueError) as error:
            log.warning("the fork server cannot be understood: %s", error)
            with suppress(ProcessLookupError):
                self._process.kill()
        finally:
            self.lost = True
            self._writer.close()
            for process in self._running.values():
                process.lose()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(_Refused("it has died"))

    def _heed(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        if "code" in message:
            self._running.pop(number).end(message["code"])
            return
        answer = self._asked.get(number)
        if "pid" in message:
            self.has_forked = True
            process = self._running[number] = Forked(message["pid"])
            if answer is not None and not answer.done():
                answer.set_result(process)
        elif answer is not None and not answer.done():
            answer.set_exception(_Refused(message["error"]))
