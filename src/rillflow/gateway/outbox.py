"""Events between a call at work and the connection that carries them: bounded, and joined where several wait.

A connection that does not keep up makes the call wait, not the memory grow.
"""

from __future__ import annotations

import asyncio

BOUND = 64 << 10  # bytes that may wait before the call does
COMMENT = b": keep-alive\n\n"  # clients skip what begins with a colon


class Outbox:
    """One writer, one reader. After `end` the reader gets what is left, then nothing."""

    def __init__(self, bound: int = BOUND) -> None:
        self._bound = bound
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Returns once there is room for more. How long that may take is the reader's to bound."""
        self._add(data)
        while self._size >= self._bound:
            self._taken.clear()
            await self._taken.wait()

    def remind(self) -> None:
        """Give a reader that waits an empty comment to send, between two events."""
        if not self._parts and not self._ended:
            self._add(COMMENT)

    def end(self, last: bytes = b"") -> None:
        self._add(last)
        self._ended = True
        self._filled.set()

    async def take(self) -> bytes:
        """All that waits, at least one event; empty once everything was taken and no more will come."""
        if not self._parts and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._taken.set()
        return data

    def _add(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._size += len(data)
            self._filled.set()
