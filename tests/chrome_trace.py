"""Checks a file against Chrome's trace event format, as far as Perfetto needs it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

_FIELDS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}


def check_trace(trace: dict[str, Any]) -> None:
    """All phases are known and whole, times are sorted, slices of a track do not overlap, flows are bound in order."""
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in _FIELDS, event
        assert _FIELDS[event["ph"]] <= event.keys(), event
        assert all(isinstance(event[name], int) for name in ("ts", "pid", "tid")), event
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert times[0] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks.keys() <= named
    for slices in tracks.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(slices)), "they overlap"
    flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            ends = tracks[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] < end for begin, end in ends), f"{event} lies in no slice"
    for steps in flows.values():
        assert "".join(event["ph"] for event in steps) in ("sf", "stf"), steps


def flows_of(trace: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the slices that each flow leads through."""
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found: dict[str, list[str]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            (inside,) = [
                one["name"]
                for one in slices
                if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
                and one["ts"] <= event["ts"] < one["ts"] + one["dur"]
            ]
            found[event["id"]].append(inside)
    return dict(found)
