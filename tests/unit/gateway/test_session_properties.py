"""Random session histories through the gateway's own calls: what trains is what was sampled and seen, exactly once,
behind exactly what the engine was given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_world import ENDS, FOLLOWS, RENDERERS, WORDS, Answering, Ask, Change, Move, World, check

from soak import repetitions

ANSWERING = st.builds(
    Answering,
    word=st.integers(0, len(WORDS)),
    end=st.sampled_from(ENDS),
    step=st.integers(1, 6),
    split=st.booleans(),
    seam=st.sampled_from(["", "", "weights", "engine_lost"]),
)
TALK = st.one_of(st.integers(-4, -1), st.integers(-4, -1), st.integers(0, 40))  # the latest more often than any
ASK = st.builds(
    Ask,
    talk=TALK,
    answers=st.one_of(st.tuples(ANSWERING), st.lists(ANSWERING, min_size=2, max_size=3).map(tuple)),
    follow=st.integers(0, len(FOLLOWS) - 1),
    keep_reasoning=st.booleans(),
)
CHANGE = st.builds(
    Change, talk=TALK, kind=st.sampled_from(["edit", "edit", "compact", "tools"]), place=st.integers(0, 9)
)
MOVES: Any = st.lists(
    st.one_of(st.tuples(ASK), st.tuples(ASK), st.lists(ASK, min_size=2, max_size=3).map(tuple), CHANGE), max_size=14
)
TEMPLATE = st.sampled_from(sorted(RENDERERS))
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def play(template: str, moves: list[Move]) -> None:
    world = World(template)
    check(world, asyncio.run(world.play(moves)))


@QUICK
@given(TEMPLATE, MOVES)
def test_what_trains_is_what_was_sampled(template: str, moves: list[Move]) -> None:
    play(template, moves)


@pytest.mark.slow
@pytest.mark.soak
@settings(QUICK, max_examples=repetitions(100, 3000))
@given(TEMPLATE, MOVES)
def test_what_trains_is_what_was_sampled_at_length(template: str, moves: list[Move]) -> None:
    play(template, moves)
