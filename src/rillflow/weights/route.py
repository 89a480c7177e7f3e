"""The way to a version: from what one has, by deltas, or from a whole version and the deltas after it.

A version has one delta at most, so there is one chain of deltas that ends at it; a way begins somewhere on this chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from rillflow.errors import WeightsError
from rillflow.weights.manifest import Entry

Mode = Literal["auto", "full", "delta"]


class Route(NamedTuple):
    """First the whole version `snapshot` (None: what one has), then the deltas of the versions `deltas`, in order."""

    snapshot: int | None
    deltas: tuple[int, ...]
    bytes: int


def route(entries: Mapping[int, Entry], have: int | None, want: int, mode: Mode = "auto") -> Route:
    """The way from `have` (None: nothing) to `want` that costs the fewest bytes.

    With mode `delta` it begins with what one has wherever that is possible, with `full` never, and then it takes as few
    deltas as possible. WeightsError when there is no way.
    """
    if have == want:
        return Route(None, (), 0)
    ways = list(_ways(entries, have if mode != "full" else None, want))
    if not ways:
        raise WeightsError(
            f"there is no way to version {want} from {'nothing' if have is None else f'version {have}'}",
            "the weight store has lost files that it needs: look at the newest line again, or restart the trainer, "
            "which writes its version whole",
        )
    return min(ways, key=lambda way: _cost(way, mode))


def _ways(entries: Mapping[int, Entry], have: int | None, want: int) -> Iterator[Route]:
    """Walks the chain backwards, from `want` to where it ends."""
    deltas: tuple[int, ...] = ()
    cost, at = 0, want
    while True:
        if at == have:
            yield Route(None, deltas, cost)
        entry = entries.get(at)
        if entry is None:
            return
        if entry.full_bytes:
            yield Route(at, deltas, cost + entry.full_bytes)
        # A line is data: one that does not lead back must not be followed forever.
        if not entry.delta_bytes or entry.delta_of is None or entry.delta_of >= at:
            return
        deltas, cost, at = (at, *deltas), cost + entry.delta_bytes, entry.delta_of


def _cost(way: Route, mode: Mode) -> tuple[int, ...]:
    if mode == "delta":
        return int(way.snapshot is not None), way.bytes, len(way.deltas)
    return (len(way.deltas), way.bytes) if mode == "full" else (way.bytes, len(way.deltas))
