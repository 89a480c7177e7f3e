"""The load of `bench.gateway`: concurrent agents on keep-alive connections, each playing session after session.

A process of its own with a client as lean as can be, the same for every target. A line of JSON asks for one
measurement, a line answers: latencies of all calls in seconds, and calls a second between the first and the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, cast

import httptools

Ask = dict[str, Any]


class Connection(asyncio.Protocol):
    """One request at a time; `ask` returns when its answer is whole."""

    def __init__(self) -> None:
        self._done: asyncio.Future[int] | None = None
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"hung up: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.tail = data

    def on_message_complete(self) -> None:
        assert self._done is not None
        self._done.set_result(self._parser.get_status_code())

    async def ask(self, request: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        status = await self._done
        if status != 200 or b'"error"' in self.tail:
            raise RuntimeError(f"status {status}: {self.tail[:500]!r}")

    def close(self) -> None:
        self._transport.close()


def request_bytes(port: int, key: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def agent(ask: Ask, keys: list[str], left: list[int], latencies: list[float]) -> None:
    """Plays the turns of a session, then takes the next, while there are calls left."""
    port, bodies = ask["port"], ask["bodies"]
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    while left[0] > 0:
        key = keys.pop() if len(keys) > 1 else keys[0]
        for body in bodies:
            if left[0] <= 0:
                break
            left[0] -= 1
            started = time.perf_counter()
            await connection.ask(request_bytes(port, key, body))
            latencies.append(time.perf_counter() - started)
    connection.close()


async def measure(ask: Ask) -> dict[str, Any]:
    latencies: list[float] = []
    keys, left = list(ask["keys"]), [int(ask["calls"])]
    started = time.perf_counter()
    await asyncio.gather(*(agent(ask, keys, left, latencies) for _ in range(ask["agents"])))
    return {"latencies": latencies, "rate": len(latencies) / (time.perf_counter() - started)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(measure(json.loads(line)))), flush=True)
