"""A bad network between two parts: a TCP forwarder that cuts, stalls, slows and refuses connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 16 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


class Forwarder:
    """Carries bytes to `upstream` (an URL, which may change) and back.

    `delay` is the number of seconds that every piece is held back, `rate` the bytes a second in each direction of a
    connection; 0 means unlimited.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.url = ""
        self.delay = 0.0
        self.rate = 0.0
        self.carried = 0  # bytes
        self.cuts = 0  # connections that were reset
        self._refuses = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection at both ends; new ones are made, unless they are refused until `mend`."""
        self._refuses = refuse
        for writer in list(self._open):
            self.cuts += 1
            _reset(writer)

    def stall(self) -> None:
        """Let no byte through from now on, silently: the connections stay open."""
        self._flows.clear()

    def mend(self) -> None:
        self._refuses = False
        self._flows.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if self._refuses:
            _reset(writer)
        else:
            with suppress(OSError, asyncio.CancelledError):
                await self._connect(reader, writer)
        self._tasks.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._open.add(writer)
        try:
            back, far = await asyncio.open_connection("127.0.0.1", int(self.upstream.rsplit(":", 1)[1]))
            ends.add(far)
            self._open.add(far)
            await asyncio.gather(self._carry(reader, far), self._carry(back, writer))
        finally:
            for end in ends:
                self._open.discard(end)
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await self._flows.wait()
            await asyncio.sleep(self.delay + (len(data) / self.rate if self.rate else 0.0))
            writer.write(data)
            await writer.drain()
            self.carried += len(data)
        writer.write_eof()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    if found is not None:
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@asynccontextmanager
async def forwarder(upstream: str) -> AsyncIterator[Forwarder]:
    made = Forwarder(upstream)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.close()
