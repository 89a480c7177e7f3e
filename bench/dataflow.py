"""The dataflow layer against TransferQueue, with both durabilities, and how its cost grows.

    bash scripts/make_venv.sh .venv-transferqueue transferqueue
    python -m bench.dataflow [--quick] [--json FILE] [--peer PYTHON] [--only abcgn]

Side by side in one run, taking turns, with data of the same shape. TransferQueue keeps it in memory (its default
backend on a local Ray). We have it in a file before it is acknowledged, in the page cache (`process`) or synced
(`machine`), and the ledger always synced; every checksum is verified on reading. Beside the wall time stand core
milliseconds: of all processes of a side, but not of the kernel's own threads. The disk's own figures stand first.

(a) its own benchmark's shape, 1024 x 9 x 8192 float32: one put, one get; round after round in one run. A put of ours
    completes the task in the ledger, which is synced: the rows alone stand beside
(b) ragged trajectories of 200 to 8,000 tokens with six columns: put singly, one after the other; by 64 producers of one
    process at once, each its own row; read in batches of 64. The peer's call for 64 rows at once stands beside.
(c) 64 producers in two processes, 8 consumers of micro-batches: rows a second from the first put to the last read
(g) one run of up to 1e6 samples: seconds a sample and memory of the service, against those at 1e4
(n) a lease after 10,000 nodes have come and gone, against one where none has: at most 1.5 times the time
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from bench import dataflow_ours as ours
from bench.common import Report, parser
from bench.dataflow_growth import Point, grow
from bench.dataflow_nodes import lease_seconds
from rillflow.types import Durability

Times = dict[str, float]
DURABILITIES: tuple[Durability, ...] = get_args(Durability)

ROWS, COLUMNS, WIDTH = 1024, 9, 8192
BYTES = ROWS * COLUMNS * WIDTH * 4
PRODUCERS, PROCESSES, CONSUMERS = 64, 2, 8
WARM = 4  # rounds of (a) that do not count
GONE = 10_000  # nodes of (n)
DEFAULT_PEER = Path(".venv-transferqueue/bin/python")


class Peer:
    """TransferQueue in its own Python: a line of JSON asks, a line answers."""

    def __init__(self, python: Path) -> None:
        script = Path(__file__).with_name("dataflow_transferqueue.py")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [str(python), str(script)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def ask(self, **request: Any) -> Times:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Times:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise RuntimeError(f"TransferQueue failed: {answer['error']}")
        return dict(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def peer_of(python: Path) -> Iterator[Peer | None]:
    if not python.is_file():
        print(
            f"no peer: {python} is missing; run `bash scripts/make_venv.sh .venv-transferqueue transferqueue`",
            file=sys.stderr,
        )
        yield None
        return
    peer = Peer(python)
    try:
        yield peer
    finally:
        peer.close()


def medians(rounds: list[Times]) -> Times:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


class Row(NamedTuple):
    """A row of the report: `amount` in the time that each side names so."""

    name: str
    ours: str
    peers: str
    goal: float | None = None
    amount: float = 1.0
    unit: str = "rows/s"


class Comparison:
    """Takes turns with the peer and adds rows to the report. The goals are for the durability `process`."""

    def __init__(self, report: Report, peer: Peer | None, quick: bool) -> None:
        self._report = report
        self._peer = peer
        self._rounds = 3 if quick else 7
        generator = random.Random(0)
        self._lengths = [generator.randint(200, 8000) for _ in range(1024 if quick else 4096)]

    def disk(self) -> None:
        """Measure the disk, which bounds any put."""
        for name, synced in (("write", False), ("write and sync", True)):
            seconds = statistics.median(ours.disk_write(BYTES, synced=synced) for _ in range(3))
            self._report.add(f"the disk alone: {name}, 302 MB", BYTES / seconds / 1e9, None, unit="GB/s")
        self._report.add("the disk alone: 4 KiB and sync", ours.disk_sync(200) * 1e3, None, unit="ms")

    def rectangle(self) -> None:
        """Round after round, as a run goes on: both sides let go of a round's rows before the next."""

        shape = {"rows": ROWS, "columns": COLUMNS, "width": WIDTH}

        async def rounds(durability: Durability) -> tuple[list[Times], list[Times]]:
            mine, theirs = [], []
            async with ours.running(durability, self._rounds + WARM + 1, 1, 1, drop_after=0.1) as (_, peers):
                work = ours.Rectangle(peers, ROWS, COLUMNS, WIDTH)
                await work.seat.join()
                for _ in range(self._rounds + WARM):
                    mine.append(await work.round())
                    theirs += await asyncio.to_thread(self._ask, durability, "a", **shape)
            return mine[WARM:], theirs[WARM:]

        for durability in DURABILITIES:
            mine, theirs = asyncio.run(rounds(durability))
            for name, what, peers, goal in (
                ("put", "put", "put", 3.0),
                ("the rows alone, without their completion in the ledger", "rows", "put", None),
                ("get", "get", "get", 10.0),
            ):
                self._add(Row(f"(a) {name}", what, peers, goal, BYTES / 1e9, "GB/s"), durability, mine, theirs)

    def ragged(self) -> None:
        single = 128
        rows = [
            Row("(b) put, one after the other", "put", "put", 10.0),
            Row("(b) the row alone, without its completion in the ledger", "row", "put"),
            Row("(b) put, 64 producers at once", "put_many", "put_many", 10.0),
            Row("(b) put, 64 at once (peer: one call for 64 rows)", "put_many", "put_batched"),
            Row("(b) get, 64 a call", "get", "get", 10.0),
        ]
        for durability in DURABILITIES:
            mine, theirs = [], []
            for _ in range(max(1, self._rounds // 2)):
                mine.append(asyncio.run(ours.ragged(durability, self._lengths, single, 64)))
                theirs += self._ask(durability, "b", lengths=self._lengths, single=single, batch=64)
            for row in rows:
                self._add(row, durability, mine, theirs)

    def streaming(self) -> None:
        shape: dict[str, Any] = {
            "lengths": self._lengths,
            "producers": PRODUCERS,
            "producer_processes": PROCESSES,
            "consumers": CONSUMERS,
            "micro": 32,
        }
        for durability in DURABILITIES:
            mine, theirs = [], []
            for _ in range(max(1, self._rounds // 2)):
                mine.append(asyncio.run(ours.streaming(durability, **shape)))
                theirs += self._ask(durability, "c", **shape)
            row = Row("(c) 64 producers, 8 consumers", "stream", "stream", 10.0)
            self._add(row, durability, mine, theirs)

    def _ask(self, durability: Durability, case: str, **shape: Any) -> list[Times]:
        """The peer takes its turns beside `process`, for which the goals are."""
        return [self._peer.ask(case=case, **shape)] if self._peer is not None and durability == "process" else []

    def _add(self, row: Row, durability: Durability, mine: list[Times], theirs: list[Times]) -> None:
        """One row for the rate, and one for the core milliseconds of it where they were measured."""
        reason = "" if theirs else "see process" if self._peer is not None else "no TransferQueue here"
        own, other = medians(mine), medians(theirs) if theirs else None
        self._report.add(
            f"{row.name}, {durability}",
            row.amount / own[row.ours],
            None if other is None else row.amount / other[row.peers],
            unit=row.unit,
            goal=row.goal if theirs else None,
            reason=reason,
        )
        if f"{row.ours} cores" not in own:
            return
        self._report.add(
            f"{row.name}, {durability}: cores",
            own[f"{row.ours} cores"] * 1e3,
            None if other is None else other[f"{row.peers} cores"] * 1e3,
            unit="core ms" if row.unit == "GB/s" else "core ms a row",
            less_is_better=True,
            reason=reason,
        )


def report_growth(report: Report, points: list[Point]) -> None:
    """Against the point at 1e4; a ratio of at least 1/1.3 (time) and 1/2 (memory) is asked for."""
    base = next((point for point in points if point.samples == 10_000), points[0])
    for point in points:
        goals = (1 / 1.3, 1 / 2) if point.samples > base.samples else (None, None)
        name, micro = f"(g) {point.samples:,} samples", point.seconds * 1e6
        unit = "µs a sample (peer: at 10,000)"
        report.add(f"{name}: time", micro, base.seconds * 1e6, unit=unit, goal=goals[0], less_is_better=True)
        unit = "MB resident (peer: at 10,000)"
        report.add(f"{name}: memory", point.resident, base.resident, unit=unit, goal=goals[1], less_is_better=True)
        report.add(f"{name}: payload kept", point.stored, None, unit="MB on disk")


def report_nodes(report: Report, rounds: int) -> None:
    after, none = lease_seconds(GONE, rounds)
    unit = "µs a lease (peer: no node has gone)"
    name = f"(n) lease, {GONE:,} nodes gone"
    report.add(name, after * 1e6, none * 1e6, unit=unit, goal=1 / 1.5, less_is_better=True)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--peer", type=Path, default=DEFAULT_PEER, help="Python that has TransferQueue")
    arguments.add_argument("--only", default="abcgn", help="which of the cases a, b, c, g and n")
    given = arguments.parse_args()
    report = Report("dataflow")
    if set(given.only) & set("abc"):
        with peer_of(given.peer) as peer:
            comparison = Comparison(report, peer, given.quick)
            comparison.disk()
            cases = {"a": comparison.rectangle, "b": comparison.ragged, "c": comparison.streaming}
            for name, case in cases.items():
                if name in given.only:
                    case()
    if "g" in given.only:
        sizes = [1_000, 10_000, 40_000] if given.quick else [1_000, 10_000, 100_000, 1_000_000]
        report_growth(report, asyncio.run(grow(sizes)))
    if "n" in given.only:
        report_nodes(report, 500 if given.quick else 2000)
    report.finish(given.json)


if __name__ == "__main__":
    main()
