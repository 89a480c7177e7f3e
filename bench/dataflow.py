"""The dataflow layer against TransferQueue, and how its cost grows.

    bash scripts/make_venv.sh .venv-transferqueue transferqueue
    python -m bench.dataflow [--quick] [--json FILE] [--peer PYTHON] [--only abcgn]

Side by side in one run, taking turns, with data of the same shape. TransferQueue keeps it in memory (its default
backend on a local Ray); we have it on disk, synced, before it is acknowledged, and verify every checksum on reading.

(a) its own benchmark's shape, 1024 x 9 x 8192 float32: one put, one get; round after round in one run, so that our
    segment files are those of dropped ones, as in any run that has lasted a while
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
from typing import Any

from bench import dataflow_ours as ours
from bench.common import Report, parser
from bench.dataflow_growth import Point, grow
from bench.dataflow_nodes import lease_seconds

Times = dict[str, float]

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


class Comparison:
    """Takes turns with the peer and adds rows to the report."""

    def __init__(self, report: Report, peer: Peer | None, quick: bool) -> None:
        self._report = report
        self._peer = peer
        self._rounds = 3 if quick else 7
        generator = random.Random(0)
        self._lengths = [generator.randint(200, 8000) for _ in range(1024 if quick else 4096)]

    def _add(self, name: str, mine: float, theirs: float | None, unit: str, goal: float | None) -> None:
        reason = "" if theirs is not None else "no TransferQueue here"
        self._report.add(name, mine, theirs, unit=unit, goal=goal, reason=reason)

    def rectangle(self) -> None:
        """Round after round, as a run goes on: both sides let go of a round's rows before the next.

        The first rounds warm both up. With us, what is let go of is dropped a moment later, and its files are written
        over by then, as they are in any run that has lasted `drop_after`.
        """

        async def rounds() -> tuple[list[Times], list[Times]]:
            mine, theirs = [], []
            async with ours.running(self._rounds + WARM + 1, 1, 1, drop_after=0.1) as (_, peers):
                work = ours.Rectangle(peers, ROWS, COLUMNS, WIDTH)
                await work.seat.join()
                for _ in range(self._rounds + WARM):
                    mine.append(await work.round())
                    if self._peer is not None:
                        ask = {"case": "a", "rows": ROWS, "columns": COLUMNS, "width": WIDTH}
                        theirs.append(await asyncio.to_thread(lambda ask=ask: self._peer.ask(**ask)))  # type: ignore[union-attr]
            return mine[WARM:], theirs[WARM:]

        mine, theirs = asyncio.run(rounds())
        raw = statistics.median(ours.raw_disk(BYTES) for _ in range(3))
        self._report.add("(a) the disk alone: write and sync", BYTES / raw / 1e9, None, unit="GB/s")
        for what, goal in (("put", 3.0), ("get", 10.0)):
            other = BYTES / medians(theirs)[what] / 1e9 if theirs else None
            self._add(f"(a) {what}", BYTES / medians(mine)[what] / 1e9, other, "GB/s", goal)

    def ragged(self) -> None:
        single = 128
        mine, theirs = [], []
        for _ in range(max(1, self._rounds // 2)):
            mine.append(asyncio.run(ours.ragged(self._lengths, single, 64)))
            if self._peer is not None:
                theirs.append(self._peer.ask(case="b", lengths=self._lengths, single=single, batch=64))
        names = {
            "put": ("(b) put, one after the other", "put", 10.0),
            "put_many": ("(b) put, 64 producers at once", "put_many", 10.0),
            "put_batched": ("(b) put, 64 at once (peer: one call for 64 rows)", "put_many", None),
            "get": ("(b) get, 64 a call", "get", 10.0),
        }
        for what, (name, own, goal) in names.items():
            other = 1 / medians(theirs)[what] if theirs else None
            self._add(name, 1 / medians(mine)[own], other, "rows/s", goal)

    def streaming(self) -> None:
        ask = {
            "lengths": self._lengths,
            "producers": PRODUCERS,
            "producer_processes": PROCESSES,
            "consumers": CONSUMERS,
            "micro": 32,
        }
        mine, theirs = [], []
        for _ in range(max(1, self._rounds // 2)):
            mine.append(asyncio.run(ours.streaming(**ask)))  # type: ignore[arg-type]
            if self._peer is not None:
                theirs.append(self._peer.ask(case="c", **ask))
        other = 1 / medians(theirs)["stream"] if theirs else None
        self._add("(c) 64 producers, 8 consumers", 1 / medians(mine)["stream"], other, "rows/s", 10.0)


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
