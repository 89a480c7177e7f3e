"""Routes: the fewest bytes, compared with all ways there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import WeightsError
from rillflow.weights.manifest import Entry, Mode, Route, route

CHAIN = {
    0: Entry(full_bytes=100),
    **{version: Entry(delta_of=version - 1, delta_bytes=3) for version in range(1, 10)},
    5: Entry(delta_of=4, delta_bytes=3, full_bytes=100),
}


def test_deltas_from_what_one_has() -> None:
    assert route(CHAIN, 3, 9) == Route(None, (4, 5, 6, 7, 8, 9), 18)


def test_a_whole_version_and_what_came_after_it() -> None:
    assert route(CHAIN, None, 9) == Route(5, (6, 7, 8, 9), 112)
    assert route(CHAIN, 77, 9) == Route(5, (6, 7, 8, 9), 112), "an orphan or what was pruned is no beginning"
    assert route(CHAIN, None, 5) == Route(5, (), 100)


def test_nothing_to_do() -> None:
    assert route({}, 4, 4) == Route(None, (), 0)


def test_a_long_chain_costs_more_than_a_whole_version() -> None:
    far = {0: Entry(full_bytes=100), **{v: Entry(delta_of=v - 1, delta_bytes=30) for v in range(1, 9)}}
    far[8] = Entry(delta_of=7, delta_bytes=30, full_bytes=100)
    assert route(far, 0, 8).snapshot == 8
    assert route(far, 0, 8, "delta") == Route(None, tuple(range(1, 9)), 240)
    assert route(far, 7, 8) == Route(None, (8,), 30)
    assert route(far, 7, 8, "full") == Route(8, (), 100)


def test_full_takes_what_deltas_it_must() -> None:
    """A line whose trainer has only now stopped writing deltas must still be followed."""
    assert route(CHAIN, 8, 9, "full") == Route(5, (6, 7, 8, 9), 112)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {9: Entry(delta_of=8, delta_bytes=1)},
        {9: Entry(delta_of=9, delta_bytes=1)},
        {9: Entry(delta_of=10, delta_bytes=1), 10: Entry(delta_of=9, delta_bytes=1)},
        {9: Entry(delta_of=None, delta_bytes=1)},
    ],
)
def test_no_way(entries: dict[int, Entry]) -> None:
    with pytest.raises(WeightsError, match="no route leads to version 9"):
        route(entries, 3, 9)


@st.composite
def stores(draw: st.DrawFn) -> dict[int, Entry]:
    """Branches as restarts make them, with versions that are whole, deltas, or both."""
    entries: dict[int, Entry] = {}
    for version in sorted(draw(st.sets(st.integers(0, 12), min_size=1))):
        before = [known for known in entries if known < version]
        parent = draw(st.sampled_from(before)) if before and draw(st.booleans()) else None
        entries[version] = Entry(
            delta_of=parent,
            delta_bytes=draw(st.integers(1, 50)) if parent is not None else 0,
            full_bytes=draw(st.sampled_from([0, 40, 100])) if parent is not None else 100,
        )
    return entries


def all_ways(entries: dict[int, Entry], have: int | None, want: int) -> list[Route]:
    """Brute force: every state that can be reached, forwards."""
    found = [Route(version, (), entry.full_bytes) for version, entry in entries.items() if entry.full_bytes]
    at = {id(way): way.snapshot for way in found}
    if have is not None:
        found.append(Route(None, (), 0))
        at[id(found[-1])] = have
    for way in found:
        for version, entry in entries.items():
            if entry.delta_bytes and entry.delta_of == at[id(way)]:
                found.append(Route(way.snapshot, (*way.deltas, version), way.bytes + entry.delta_bytes))
                at[id(found[-1])] = version
    return [way for way in found if at[id(way)] == want]


@given(stores(), st.none() | st.integers(0, 12), st.integers(0, 12), st.sampled_from(["auto", "delta", "full"]))
def test_no_way_is_cheaper(entries: dict[int, Entry], have: int | None, want: int, mode: Mode) -> None:
    ways = all_ways(entries, None if mode == "full" and have != want else have, want)
    if not ways:
        with pytest.raises(WeightsError):
            route(entries, have, want, mode)
        return
    found = route(entries, have, want, mode)
    assert found in ways
    if mode == "auto":
        assert found.bytes == min(way.bytes for way in ways)
    elif mode == "delta":
        own = [way for way in ways if way.snapshot is None]
        assert found.bytes == min(way.bytes for way in own or ways)
        assert (found.snapshot is None) == bool(own)
    else:
        assert len(found.deltas) == min(len(way.deltas) for way in ways)
