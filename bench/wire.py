"""Calls between our processes: our wire beside aiohttp on both sides, starlette on uvicorn, and plain frames.

    python -m bench.wire [--quick] [--json FILE]

Every stack (`bench.wire_stacks`) serves from a process of its own; they take turns. Small calls are made one at a time
and 64 at once; bodies of 1 MB go one at a time, to the service and back. The figures that count are microseconds of
processor time per call, the client's and the service's; the time until the answer comes with them. The goal is an upper
limit of 150 microseconds for each side of a small call.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from contextlib import AsyncExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import Report, parser
from bench.wire_stacks import BIG, STACKS, Call, Put
from rillflow.types import FailTask

TOGETHER = 64
LIMIT = 150.0
NEWS = FailTask(
    task="g000001.3", attempt="g000001.3-1", node="node", cause="timeout", error="the episode took too long"
)


class Kind(NamedTuple):
    """One kind of call: its name, its path, its body, how many are under way at once, and what share of calls."""

    name: str
    path: str
    body: Any
    together: int
    share: float


KINDS = (
    Kind("small, one at a time", "/news", NEWS, 1, 1.0),
    Kind(f"small, {TOGETHER} at once", "/news", NEWS, TOGETHER, 1.0),
    Kind("1 MB to the service", "/bytes", Put(data=bytes(BIG)), 1, 0.02),
    Kind("1 MB from the service", "/bytes", Put(size=BIG), 1, 0.02),
)


class Figures(NamedTuple):
    """Microseconds per call."""

    client: float
    service: float
    latency: float


def on_processor(pid: int) -> float:
    """Seconds that a process with one thread has had the processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def measured(call: Call, kind: Kind, count: int, pid: int) -> Figures:
    count, together = max(int(count * kind.share), 1), kind.together

    async def one_after_the_other() -> None:
        for _ in range(count // together):
            await call(kind.path, kind.body)

    service, client, clock = on_processor(pid), time.process_time(), time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(together)))
    taken = (time.process_time() - client, on_processor(pid) - service, (time.perf_counter() - clock) * together)
    return Figures(*(seconds / count * 1e6 for seconds in taken))


async def compare(report: Report, urls: dict[str, tuple[str, int]], rounds: int, count: int) -> None:
    async with AsyncExitStack() as stack:
        calls: dict[str, Call] = {
            name: await stack.enter_async_context(STACKS[name].client(url)) for name, (url, _) in urls.items()
        }
        for kind in KINDS:
            found: dict[str, list[Figures]] = {name: [] for name in calls}
            for _ in range(rounds + 1):
                for name, call in calls.items():
                    found[name].append(await measured(call, kind, count, urls[name][1]))
            add(report, kind, found)


def add(report: Report, kind: Kind, found: dict[str, list[Figures]]) -> None:
    """Add the medians of a kind, the first round left out: a row for each side of ours against each peer."""
    medians = {
        name: Figures(*(statistics.median(column) for column in zip(*figures[1:], strict=True)))
        for name, figures in found.items()
    }
    ours = medians.pop("ours")
    goal = LIMIT if kind.path == "/news" else None
    for side in ("client", "service", "latency"):
        for name, peer in medians.items():
            report.add(
                f"{kind.name}: {side}",
                getattr(ours, side),
                getattr(peer, side),
                unit=f"µs ({name})",
                limit=None if side == "latency" else goal,
                less_is_better=True,
            )


def start(name: str) -> tuple[BaseProcess, tuple[str, int]]:
    """Start the service of a stack; returns the process, and its URL and id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=STACKS[name].serve, args=(there,), daemon=True)
    process.start()
    if not here.poll(120):
        raise TimeoutError(f"the service of {name!r} did not start within 120 s")
    assert process.pid is not None
    return process, (here.recv(), process.pid)


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    report = Report("wire")
    processes: list[BaseProcess] = []
    urls: dict[str, tuple[str, int]] = {}
    try:
        for name in STACKS:
            process, urls[name] = start(name)
            processes.append(process)
        asyncio.run(compare(report, urls, 3 if given.quick else 9, 1_280 if given.quick else 6_400))
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    report.finish(given.json)


if __name__ == "__main__":
    main()
