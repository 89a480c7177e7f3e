"""One sandbox, seen from outside: it is used once and thrown away.

Its channel carries frames, its output is read as it comes and bounded, and its end is learned from the keeper, whom
the code inside cannot reach. `Left` says that the code inside ended its part; that is the candidate's doing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

from rillflow.agents.sandbox.cell import Cell
from rillflow.agents.sandbox.inside.frames import HEAD
from rillflow.agents.sandbox.inside.values import NotPlain, pack, unpack
from rillflow.errors import SandboxError

_GRACE = 30.0  # seconds for what takes milliseconds; a busy machine is no fault
_PIECE = 1 << 16
_LONGEST = 1 << 20  # bytes of a frame from inside
_WORD = 1 << 15  # bytes of one that is read here: small, so that no content makes reading it slow


class Left(Exception):
    """The code inside has closed its channel, or wrote something on it that is no frame."""


class Box:
    """Made inside the loop that uses it; `dispose` always, in the end."""

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
        """Until its walls stand."""
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
        """Whether it still waits for its task, as far as can be seen."""
        return bool(self._open)

    async def task(self, name: str, seconds: float, line: socket.socket | None = None, **content: Any) -> None:
        """Give it what it is for, and one end of a line to another sandbox."""
        try:
            body = pack({"task": name, "seconds": seconds, **content})
        except NotPlain as error:
            raise SandboxError(f"a test holds what cannot be sent: {error}", "give plain values") from None
        try:
            socket.send_fds(self._channel, [b"+"], [] if line is None else [line.fileno()])
            await self._loop.sock_sendall(self._channel, HEAD.pack(len(body)) + body)
        except OSError:
            raise Left from None

    async def hear(self) -> Any:
        """The value of a short frame. It is the word of the code inside."""
        try:
            return unpack(await self.receive(_WORD))
        except (NotPlain, RecursionError):
            raise Left from None

    async def receive(self, limit: int = _LONGEST) -> bytes:
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
        """Let it end by itself `within` so many seconds, else end it; returns the exit code, -n for signal n."""
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
        """The keeper sees the end of `life` and ends everything inside."""
        if self._life.fileno() >= 0:
            with suppress(OSError):  # it has ended before
                self._life.shutdown(socket.SHUT_WR)

    def texts(self) -> tuple[str, str]:
        output, errors = (bytes(text).decode(errors="replace") for text in self._texts.values())
        return output, errors

    async def dispose(self) -> None:
        """End it if it still runs, and close every descriptor."""
        try:
            await self.end()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close every descriptor; what still runs inside is ended by that."""
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
