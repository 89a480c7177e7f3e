"""Raw connections to a service, for requests that no HTTP client would send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

SECONDS = 10.0


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> bytes:
        """Return the next bytes; empty if the service has closed the connection."""
        with suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(1 << 16), SECONDS)
        return b""

    async def all(self) -> bytes:
        """Everything until the service hangs up."""
        parts = []
        while part := await self.answer():
            parts.append(part)
        return b"".join(parts)

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await asyncio.wait_for(self._writer.wait_closed(), SECONDS)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Line]:
    line = Line(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])))
    try:
        yield line
    finally:
        await line.close()


async def exchanged(url: str, request: bytes) -> bytes:
    """The first of what is answered to one request on its own connection."""
    async with connected(url) as line:
        line.send(request)
        return await line.answer()
