"""The costs that `bench.scale` is fed with: what each operation takes of the process that serves it.

A cost is processor time of that process, not the time that its caller waits: the simulation adds the waiting. Costs
that grow with the size of the run are curves over the number of rollout nodes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Curve:
    """A cost at some sizes. Between them it is a straight line on logarithmic scales.

    Below the smallest size it is constant; beyond the largest it goes on as between the last two, but at least constant
    and at most in proportion to the size.
    """

    sizes: tuple[float, ...]
    costs: tuple[float, ...]

    def at(self, size: float) -> float:
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.costs[0]
        upper = next((n for n, known in enumerate(self.sizes) if known >= size), len(self.sizes) - 1)
        low, high = self.sizes[upper - 1], self.sizes[upper]
        first, last = (max(cost, 1e-9) for cost in self.costs[upper - 1 : upper + 1])
        slope = math.log(last / first) / math.log(high / low)
        return last * (size / high) ** min(max(slope, 0.0), 1.0) if size > high else first * (size / low) ** slope


@dataclass(frozen=True)
class LedgerCosts:
    """Seconds of the dataflow service, by the number of nodes, with a window of groups that fits so many.

    A call costs `_call`, and `_each` for every task, attempt or sample in it. `open` and `commit` are of one sample of
    the batch; `peek` is of one group that is ready while there are too few; `rank` is what one rank's lease takes for
    each sample of the whole batch. `idle` is the share of a core that goes when nobody asks for anything.
    """

    lease_call: Curve
    lease_each: Curve
    nothing: Curve
    complete_call: Curve
    complete_each: Curve
    beat_call: Curve
    beat_each: Curve
    open: Curve
    peek: Curve
    rank: Curve
    commit: Curve
    idle: Curve
    sync: float  # seconds until a change is on the disk; others are served meanwhile


@dataclass(frozen=True)
class PartCosts:
    """Seconds of a storage unit, a gateway and a weight server, and what a version's delta takes."""

    put_call: float
    put_byte: float
    get_call: float
    get_byte: float
    disk_byte: float
    gateway_call: float
    gateway_token: float
    serve_call: float  # all that a weight server does for one node and version, but the bytes
    serve_byte: float
    encode_byte: float  # of the model, on a GPU
    apply_byte: float
    delta_share: float  # bytes of a delta for one weight


@dataclass(frozen=True)
class Costs:
    ledger: LedgerCosts
    parts: PartCosts

    def flat(self) -> Costs:
        """As if no question to the ledger grew with the run: each costs what it does where that is least."""
        curves = {
            name: Curve(value.sizes[:1], (min(value.costs),))
            for name, value in vars(self.ledger).items()
            if isinstance(value, Curve)
        }
        return replace(self, ledger=replace(self.ledger, **curves))

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, raw: dict[str, Any]) -> Costs:
        """Return the costs from the output of `dump`, perhaps through JSON."""
        ledger = {
            name: Curve(tuple(value["sizes"]), tuple(value["costs"])) if isinstance(value, dict) else float(value)
            for name, value in raw["ledger"].items()
        }
        return cls(LedgerCosts(**ledger), PartCosts(**{name: float(value) for name, value in raw["parts"].items()}))


def call_and_each(few: tuple[float, float], many: tuple[float, float]) -> tuple[float, float]:
    """Return the cost of a call and of each item, from the costs of calls with few and with many items."""
    each = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
    return max(0.0, few[1] - each * few[0]), each


class Meter:
    """Measure the processor time of another process, less its idle consumption."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | 2  # how Linux names the clock of a process
        self.idle = 0.0

    def start(self) -> None:
        self._began = (time.clock_gettime(self._clock), time.perf_counter())

    def stop(self, calls: int = 1) -> float:
        """Return the seconds since `start` for each of `calls` calls."""
        used = time.clock_gettime(self._clock) - self._began[0]
        passed = time.perf_counter() - self._began[1]
        return max(0.0, used - self.idle * passed) / calls


def recorded(bench: str, name: str) -> float:
    """Return the results of another bench from its file in `bench/results`."""
    rows: Iterable[dict[str, Any]] = json.loads((RESULTS / f"{bench}.json").read_text())["results"]
    found = [float(row["ours"]) for row in rows if row["name"] == name]
    if not found:
        raise SystemExit(f"bench/results/{bench}.json has no result {name!r}: it was measured again under another name")
    return found[0]
