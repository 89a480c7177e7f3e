"""A running zygote and one of its sandboxes, seen from outside.

A `Cell` is a zygote: it is started once and forks a sandbox on each request. It lives as long as its control socket and
the thread that started it. If this process dies, the kernel ends the zygote and all its sandboxes.

A `Box` is one sandbox, which is used once. Its channel carries frames. Its output is read continuously and bounded. Its
keeper, which the code inside cannot reach, reports its end. `Left` means that the code inside ended the conversation.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from contextlib import suppress
from typing import IO, Any

from rillflow.agents.sandbox import isolation
from rillflow.agents.sandbox.inside.values import HEAD, NotPlain, pack, unpack
from rillflow.agents.sandbox.interface import SandboxConfig
from rillflow.errors import SandboxError

_START = 60.0  # seconds; a busy machine, and packages to load
_MIB = 1 << 20


class Cell:
    """A zygote. The constructor waits until it is ready; an error says why it is not."""

    def __init__(self, config: SandboxConfig) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the cell
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start(config, theirs, self._errors)
        except BaseException:
            self._control.close()
            self._errors.close()
            raise
        try:
            self._control.settimeout(_START)
            self._control.sendall(pack(_settings(config)))
            ready = self._control.recv(16)
        except OSError as error:
            ready = str(error).encode()
        if ready != b"ready":
            self._end()
            said = self._said() or "no reason given"
            self._errors.close()
            raise SandboxError(f"the sandbox does not start: {said}", isolation.INSTALL)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, descriptors: list[int]) -> None:
        """Request a sandbox that owns these descriptors."""
        try:
            socket.send_fds(self._control, [b"+"], descriptors)
        except OSError as error:
            raise SandboxError(
                f"the sandbox's first process has gone: {error}", "the next run starts it again"
            ) from None

    def close(self) -> None:
        """End the zygote and its sandboxes."""
        self._end()
        self._errors.close()

    def _end(self) -> None:
        """Close the control socket, at which the zygote exits; kill it if it does not."""
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read(4000).decode(errors="replace").strip()


def _settings(config: SandboxConfig) -> dict[str, Any]:
    walled = config.isolation == "bubblewrap"
    disk = config.disk * _MIB
    return {
        "isolation": config.isolation,
        "home": isolation.HOME if walled else str(isolation.INSIDE.parent),
        "paths": [isolation.PACKAGES] if walled else [],
        "packages": list(config.packages) if walled else [],
        "limits": {"memory": config.memory * _MIB, "processes": config.processes, "disk": disk},
        "filter": isolation.program() if walled else b"",
    }


def _start(config: SandboxConfig, control: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    number = control.fileno()
    if config.isolation == "process":
        if config.packages:
            raise SandboxError("`packages` needs the isolation bubblewrap", "leave `packages` out")
        line = isolation.python_command(str(isolation.INSIDE.parent), number)
        return _spawn(line, (number,), errors)
    program = os.memfd_create("filter")
    try:
        os.write(program, isolation.program(building=True))
        os.lseek(program, 0, os.SEEK_SET)
        return _spawn(isolation.command(config.packages, number, program), (number, program), errors)
    finally:
        os.close(program)


def _spawn(line: list[str], descriptors: tuple[int, ...], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=descriptors,
            env=isolation.environment(),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the sandbox does not start: {error}", isolation.INSTALL) from None


_GRACE = 30.0  # seconds for what takes milliseconds, on a busy machine
_PIECE = 1 << 16
_LONGEST = 1 << 20  # bytes of a frame from inside
_WORD = 1 << 15  # bytes of a frame that is decoded here: small, so that decoding is always fast


class Left(Exception):
    """The code inside closed its channel, or wrote something that is not a frame."""


class Box:
    """A sandbox of the running event loop. Call `dispose` in the end."""

    def __init__(self, cell: Cell, output: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = output
        self._channel, theirs = socket.socketpair()
        self._life, keeper = socket.socketpair()
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        try:
            cell.ask([theirs.fileno(), *writers, keeper.fileno()])
        except BaseException:
            for reader in readers:
                os.close(reader)
            self._channel.close()
            self._life.close()
            raise
        finally:
            for end in (theirs, keeper):
                end.close()
            for writer in writers:
                os.close(writer)
        self._channel.setblocking(False)
        self._life.setblocking(False)
        self._texts = {reader: bytearray() for reader in readers}
        self._open = set(readers)
        self._closed = asyncio.Event()
        self._code: int | None = None
        self.overflowed = False
        self.keep_output = True
        for reader in readers:
            os.set_blocking(reader, False)
            self._loop.add_reader(reader, self._read, reader)

    async def up(self) -> None:
        """Wait until the sandbox is isolated."""
        try:
            async with asyncio.timeout(_GRACE):
                if await self.receive() == b"up":
                    return
        except (Left, TimeoutError):
            pass
        await self.end()
        raise SandboxError(f"a sandbox does not start: {self.texts()[1].strip() or 'no reason given'}")

    @property
    def fresh(self) -> bool:
        """True while it waits for its task, as far as can be seen from outside."""
        return bool(self._open)

    async def task(self, name: str, seconds: float, line: socket.socket | None = None, **content: Any) -> None:
        """Send the task, and one end of a line to another sandbox."""
        try:
            body = pack({"task": name, "seconds": seconds, **content})
        except NotPlain as error:
            raise SandboxError(f"a test holds a value that cannot be sent: {error}", "give plain values") from None
        try:
            socket.send_fds(self._channel, [b"+"], [] if line is None else [line.fileno()])
            await self._loop.sock_sendall(self._channel, HEAD.pack(len(body)) + body)
        except OSError:
            raise Left from None

    async def hear(self) -> Any:
        """Return the value of a short frame. It comes from the code inside and is not trusted."""
        try:
            return unpack(await self.receive(_WORD))
        except (NotPlain, RecursionError):
            raise Left from None

    async def receive(self, limit: int = _LONGEST) -> bytes:
        """Return the next frame."""
        (length,) = HEAD.unpack(await self._exactly(HEAD.size))
        if length > limit:
            raise Left
        return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = await self._loop.sock_recv(self._channel, min(count - len(parts), _PIECE))
            except OSError:
                raise Left from None
            if not part:
                raise Left
            parts += part
        return bytes(parts)

    async def end(self, within: float = 0.0) -> int:
        """Wait `within` seconds for the end, then kill; return the exit code, -n for signal n."""
        if self._code is not None:
            return self._code
        if within <= 0:
            self.kill()
        try:
            async with asyncio.timeout(max(within, 0) + _GRACE):
                said = await self._loop.sock_recv(self._life, 4)
                if len(said) < 4:
                    raise SandboxError("a sandbox was ended from outside", "the run can be repeated")
                self._code = int.from_bytes(said, "little", signed=True)
                await self._closed.wait()
        except (TimeoutError, OSError) as error:
            raise SandboxError(f"a sandbox does not end: {error}", "the run can be repeated") from None
        return self._code

    def kill(self) -> None:
        """Close `life`, at which the keeper kills everything inside."""
        if self._life.fileno() >= 0:
            with suppress(OSError):  # it has already ended
                self._life.shutdown(socket.SHUT_WR)

    def texts(self) -> tuple[str, str]:
        """Return standard output and standard error."""
        output, errors = (bytes(text).decode(errors="replace") for text in self._texts.values())
        return output, errors

    async def dispose(self) -> None:
        """End the sandbox and close all descriptors."""
        try:
            await self.end()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close all descriptors, which ends what still runs inside."""
        for reader in tuple(self._open):
            self._close(reader)
        self._channel.close()
        self._life.close()

    def _read(self, reader: int) -> None:
        try:
            data = os.read(reader, _PIECE)
        except BlockingIOError:
            return
        text = self._texts[reader]
        if self.keep_output:
            text += data[: self._limit - len(text)]
            if len(data) and len(text) == self._limit:
                self.overflowed = True
                self.kill()
        if not data:
            self._close(reader)

    def _close(self, reader: int) -> None:
        self._loop.remove_reader(reader)
        os.close(reader)
        self._open.discard(reader)
        if not self._open:
            self._closed.set()
