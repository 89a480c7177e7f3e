"""The cheapest route to a version, and which versions stay in a weight store. Pure functions.

A route starts from the version that a reader holds, or from a whole version, and applies deltas. A version has at most
one delta, so one chain of deltas ends at it, and a route begins somewhere on this chain.

Invariant: if a version stays, everything that it is built from stays: the whole version at the start of its chain,
every delta since then, and the base of an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from rillflow.errors import WeightsError
from rillflow.weights.manifest import Entry, Line

Mode = Literal["auto", "full", "delta"]


class Route(NamedTuple):
    """The whole version `snapshot` (None: the version that the reader holds), then the deltas of `deltas`, in order."""

    snapshot: int | None
    deltas: tuple[int, ...]
    bytes: int


def route(entries: Mapping[int, Entry], have: int | None, want: int, mode: Mode = "auto") -> Route:
    """Return the route from `have` (None: nothing) to `want` with the fewest bytes.

    With mode `delta` it starts from `have` if that is possible, with mode `full` never, and then it has as few deltas
    as possible. Raises WeightsError if no route exists.
    """
    if have == want:
        return Route(None, (), 0)
    ways = list(_ways(entries, have if mode != "full" else None, want))
    if not ways:
        raise WeightsError(
            f"no route leads to version {want} from {'nothing' if have is None else f'version {have}'}",
            "the weight store has lost files that it needs: look at the newest line again, or restart the trainer, "
            "which writes its version whole",
        )
    return min(ways, key=lambda way: _cost(way, mode))


def _ways(entries: Mapping[int, Entry], have: int | None, want: int) -> Iterator[Route]:
    """Yield the routes, walking the chain backwards from `want`."""
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
        # Lines come from outside: an entry that does not lead back must not cause an endless loop.
        if not entry.delta_bytes or entry.delta_of is None or entry.delta_of >= at:
            return
        deltas, cost, at = (at, *deltas), cost + entry.delta_bytes, entry.delta_of


def _cost(way: Route, mode: Mode) -> tuple[int, ...]:
    if mode == "delta":
        return int(way.snapshot is not None), way.bytes, len(way.deltas)
    return (len(way.deltas), way.bytes) if mode == "full" else (way.bytes, len(way.deltas))


# ---------------------------------------------------------------- retention


def in_reach(live: Collection[int], in_use: Collection[int], retain: int) -> set[int]:
    """Return the live versions from the oldest that a node serves on: nodes catch up by their deltas.

    At most the newest `retain`: a node that is further behind, or on an orphaned version, pulls a whole version.
    """
    used = [version for version in in_use if version in live]
    return {version for version in sorted(live)[-retain:] if used and version >= min(used)}


def with_needs(kept_versions: Collection[int], entries: Mapping[int, Entry], bases: Mapping[int, int]) -> set[int]:
    """Return these versions and all versions that they are built from; `bases` are those of adapters."""
    needed: set[int] = set()
    ahead = list(kept_versions)
    while ahead:
        version = ahead.pop()
        if version in needed:
            continue
        needed.add(version)
        entry = entries.get(version)
        if version in bases:
            ahead.append(bases[version])
        elif entry is not None and not entry.full_bytes and entry.delta_of is not None:
            ahead.append(entry.delta_of)
    return needed


def kept_versions(
    line: Line,
    there: Collection[int],
    bases: Mapping[int, int],
    *,
    keep: int,
    protect: Collection[int],
    in_use: Collection[int],
    retain: int,
) -> set[int]:
    """Return the versions to keep, of those that are `there`: the head, the newest `keep` live ones, those in
    `protect`, those by which nodes catch up, and the versions that all these are built from."""
    live = sorted(version for version in there if version not in line.orphaned)
    wanted = {*live[-keep:], *protect} if keep else set(protect)
    wanted |= in_reach(live, in_use, retain)
    if line.head is not None:
        wanted.add(line.head)
    return with_needs(wanted, line.entries, bases) & set(there)
