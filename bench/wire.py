"""Small calls between our processes: our own connections beside aiohttp's client, on the same service.

    python -m bench.wire [--quick] [--json FILE]

Both sides call one service in another process, taking turns, with a small msgpack body in both directions: one call at
a time, and 64 at once. The figure that counts is the client's processor time per call; calls per second come
with it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import msgspec

from bench.common import Report, parser
from rillflow.types import Ack, FailTask
from rillflow.wire import Client, Service

TOKEN, TOGETHER = "bench", 64
NEWS = FailTask(
    task="g000001.3", attempt="g000001.3-1", node="node", cause="timeout", error="the episode took too long"
)
Call = Callable[[], Awaitable[object]]


def serve(told: Connection) -> None:
    """Serve one small route until the process is killed."""

    async def take(news: FailTask) -> Ack:
        return Ack(accepted=True, reason=news.cause)

    async def work() -> None:
        service = Service("bench", TOKEN)
        service.post("/news", take, FailTask, "node")
        told.send(await service.start())
        await asyncio.sleep(3600)

    asyncio.run(work())


async def measured(call: Call, count: int, together: int) -> tuple[float, float]:
    """Return processor seconds of this process and wall seconds per call."""

    async def one_after_the_other() -> None:
        for _ in range(count // together):
            await call()

    processor, clock = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(together)))
    return (time.process_time() - processor) / count, (time.perf_counter() - clock) / count


async def compare(report: Report, url: str, rounds: int, count: int) -> None:
    client = Client(url, TOKEN)
    body = msgspec.msgpack.encode(NEWS)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=256)) as session:

        async def ours() -> object:
            return await client.post("/news", NEWS, Ack)

        async def theirs() -> object:
            timeout = aiohttp.ClientTimeout(total=30)
            async with session.post(f"{url}/news", data=body, timeout=timeout) as response:
                return msgspec.msgpack.decode(await response.read(), type=Ack)

        for together in (1, TOGETHER):
            found: dict[Call, list[tuple[float, float]]] = {ours: [], theirs: []}
            for _ in range(rounds + 1):
                for call, times in found.items():
                    times.append(await measured(call, count, together))
            processor, clock = (
                [statistics.median(times[which] for times in found[call][1:]) for call in (ours, theirs)]
                for which in (0, 1)
            )
            how = "one at a time" if together == 1 else f"{together} at once"
            unit = "µs of the client's processor (peer: aiohttp)"
            report.add(f"a call, {how}", processor[0] * 1e6, processor[1] * 1e6, unit=unit, less_is_better=True)
            report.add(f"calls, {how}", 1 / clock[0], 1 / clock[1], unit="calls/s (peer: aiohttp)")
    await client.close()


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    service = context.Process(target=serve, args=(there,), daemon=True)
    service.start()
    report = Report("wire")
    try:
        if not here.poll(60):
            raise TimeoutError("the service did not start within 60 s")
        asyncio.run(compare(report, here.recv(), 3 if given.quick else 9, 1_280 if given.quick else 6_400))
    finally:
        service.kill()
        service.join(10)
    report.finish(given.json)


if __name__ == "__main__":
    main()
