"""Which versions stay in a weight store. Pure: what is there comes in, what stays comes out.

Invariant: of whatever stays, all that is needed to put it together stays: the whole version that it begins with, every
delta since then, and the base of an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rillflow.weights.manifest import Entry, Line


def in_reach(live: Collection[int], in_use: Collection[int], retain: int) -> set[int]:
    """Live versions from the oldest one on that a node serves: by their deltas it catches up. At most the newest
    `retain`: who is further behind takes a whole version, as does who is on a version that lives no more."""
    used = [version for version in in_use if version in live]
    return {version for version in sorted(live)[-retain:] if used and version >= min(used)}


def with_needs(kept: Collection[int], entries: Mapping[int, Entry], bases: Mapping[int, int]) -> set[int]:
    """These versions and all that they are made of; `bases` are those of adapters."""
    needed: set[int] = set()
    ahead = list(kept)
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


def kept(
    line: Line,
    there: Collection[int],
    bases: Mapping[int, int],
    *,
    keep: int,
    protect: Collection[int],
    in_use: Collection[int],
    retain: int,
) -> set[int]:
    """Of the versions that are `there`: the head, the newest `keep` that live, those in `protect`, those that nodes
    catch up by, and what all these need."""
    live = sorted(version for version in there if version not in line.orphaned)
    wanted = {*live[-keep:], *protect} if keep else set(protect)
    wanted |= in_reach(live, in_use, retain)
    if line.head is not None:
        wanted.add(line.head)
    return with_needs(wanted, line.entries, bases) & set(there)
