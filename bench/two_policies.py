"""Two policies without a barrier: the cost for a trainer of a partner that is four times slower.

    python -m bench.two_policies [--quick] [--json FILE]

A real dataflow service, a real storage unit and a node whose episodes give samples to both policies. The trainers
lease, read and commit real batches; their step itself is a sleep, so that two of them do not fight for the cores of a
small machine and only what the dataflow layer makes them wait for is measured. Three settings, taking turns: the fast
policy alone in the run; beside an equally fast one; beside one whose step takes four times as long.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.common import Report, parser
from bench.traffic import COLUMNS, Processes, Producers, Seat, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter

STEP = 0.25  # seconds of the fast trainer's step
SLOWER = 4
GROUPS, GROUP = 4, 4
FAST, OTHER = "fast", "other"
SETTINGS = {"alone": None, "beside an equal": 1, f"beside one {SLOWER} times slower": SLOWER}


class Trainer(Seat):
    """Trains by sleeping; `times` are the seconds from one commit to the next."""

    def __init__(self, policy: str, client: DataflowClient, reader: PayloadReader, step: float) -> None:
        super().__init__(policy, client)
        self.times: list[float] = []
        self._reader = reader
        self._step = step

    async def run(self, going: Callable[[], bool]) -> None:
        await self.join()
        before = time.perf_counter()
        while going():
            if not await self._train():
                continue
            now = time.perf_counter()
            self.times.append(now - before)
            before = now

    async def _train(self) -> bool:
        batch = (await self.lease(GROUPS, wait=1.0)).batch
        if batch is None:
            return False
        await self._reader.read([sample.row for sample in batch.samples], list(COLUMNS))
        await asyncio.sleep(self._step)
        await self.commit(batch, step=self._step, restorable=self.version)
        return True


class Heads(Mapping[str, int]):
    """The versions that stand now: the node's episodes are sampled by them."""

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._trainers = trainers

    def __getitem__(self, policy: str) -> int:
        return self._trainers[policy].version

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainers)

    def __len__(self) -> int:
        return len(self._trainers)


async def measure(slower: int | None, steps: int) -> tuple[float, int]:
    """Median seconds of the fast trainer's step, and the steps that the other one made meanwhile."""
    names = [FAST] if slower is None else [FAST, OTHER]
    with tempfile.TemporaryDirectory() as parent:
        policy = {"trainer": {"batch_groups": GROUPS, "steps": 100_000}}
        flow = {"group_size": GROUP, "staleness": 2}
        folder = make_run(Path(parent), 100_000, dict.fromkeys(names, policy), flow)
        with Processes(folder, 1) as processes:
            client = await processes.ready()
            reader, writer = PayloadReader(client.units, folder.token), UnitWriter(client.units, folder.token)
            trainers = {n: Trainer(n, client, reader, STEP * ((slower or 1) if n == OTHER else 1)) for n in names}
            lengths = itertools.cycle(range(200, 1000, 37))
            node = Producers("n", client, writer, names, lambda lease: {n: trajectory(next(lengths)) for n in names})
            node.versions = Heads(trainers)
            playing = asyncio.create_task(node.run(16))
            fast = trainers[FAST]
            try:
                async with asyncio.timeout(300):
                    await asyncio.gather(*(t.run(lambda: fast.version < steps) for t in trainers.values()))
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                for thing in (writer, reader, client):
                    await thing.close()
    made = trainers[OTHER].version if OTHER in trainers else 0
    return statistics.median(fast.times[2:]), made


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    rounds, steps = (2, 20) if given.quick else (5, 40)
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name, slower in SETTINGS.items():
            taken[name].append(asyncio.run(measure(slower, steps)))
    report = Report("two_policies")
    alone = statistics.median(seconds for seconds, _ in taken["alone"])
    for name, found in taken.items():
        seconds = statistics.median(seconds for seconds, _ in found)
        other = statistics.median(count for _, count in found)
        label = f"step of the fast policy, {name}" + (f" (which made {other:.0f} of {steps})" if other else "")
        goal = None if name == "alone" else 0.95
        report.add(label, seconds, alone, unit="s (peer: alone)", goal=goal, less_is_better=True)
    report.finish(given.json)


if __name__ == "__main__":
    main()
