"""The ledger answers recorded calls as it did, and its tables and its audit are the same at every checkpoint."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from ledger_trace import FILE, TRACES, load, replay

MOST_BYTES = 300_000


@cache
def traces() -> dict[str, list[Any]]:
    return load()


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_recorded_trace_is_replayed(name: str) -> None:
    for number, what, before, now in replay(name, traces()[name]):
        pytest.fail(f"call {number} of {name}, {what}:\nbefore {before!r:.3000}\nnow    {now!r:.3000}")


def test_the_traces_are_small_and_make_calls_of_all_kinds() -> None:
    made = {call for trace in traces().values() for (call, _), _, _ in trace}
    assert made >= {"complete_many", "commit_batch", "join_trainer", "lose_rows", "commit_stage", "leave", "crash"}
    assert sum(map(len, traces().values())) > 2500
    assert FILE.stat().st_size < MOST_BYTES
