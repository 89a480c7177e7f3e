"""The feed gives each task to exactly one asker, and wants no more than there are hands free."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import QueueFull
from rillflow.gateway import feed as module
from rillflow.gateway.feed import Asker, EndSession, Feed, Offer, OutsideTask
from rillflow.gateway.shapes import CallRefused
from rillflow.types import Prompt
from soak import repetitions


def task(session: str) -> OutsideTask:
    return OutsideTask(
        session=session, api_key="k", base_url="b", anthropic_url="a", model="m", policies=["m"],
        prompt=Prompt(id="p", payload={}), seed=1, seconds=9.0,
    )  # fmt: skip


def offer(feed: Feed, session: str) -> Offer:
    return feed.offer(session, lambda: task(session))


def fetched(asker: Asker) -> str | None:
    got = asker.fetch()
    return None if got is None else got.session


async def test_hands_are_asked_for_and_filled_in_turn() -> None:
    feed, asked = Feed(), []
    feed.on_ask = lambda: asked.append(feed.wanted())
    one, two = feed.join(1), feed.join(2)
    assert asked == [1, 3]
    for session in ("a", "b", "c", "d"):
        offer(feed, session)
    assert feed.wanted() == 0
    assert [fetched(two), fetched(one), fetched(two)] == ["b", "a", "c"]
    assert fetched(one) is None
    feed.over("a", accepted=True)
    assert fetched(one) == "d"
    assert feed.wanted() == 0
    feed.over("d", accepted=True)
    assert feed.wanted() == 1


async def test_what_was_not_fetched_goes_to_the_next() -> None:
    feed = Feed()
    first = feed.join(2)
    waiting = offer(feed, "a")
    taken = offer(feed, "b")
    first.given.rotate(-1)
    assert fetched(first) == "b"
    feed.leave(first)
    assert (taken.taken.done(), waiting.taken.done()) == (True, False)
    second = feed.join(1)
    assert fetched(second) == "a"
    assert feed.wanted() == 0
    feed.over("b", accepted=True)  # its asker has left, so no slot becomes free
    assert feed.wanted() == 0


async def test_an_asker_that_comes_back_says_what_it_still_plays() -> None:
    feed = Feed()
    before = feed.join(2)
    offer(feed, "a")
    assert fetched(before) == "a"
    feed.leave(before)
    after = feed.join(2, ["a", "unknown"])
    assert feed.wanted() == 1
    feed.over("a", accepted=True)
    assert (feed.wanted(), after.free) == (2, 2)


async def test_sessions_of_the_node_before_go_on() -> None:
    feed = Feed()
    going_on = feed.go_on("a")
    feed.join(3, ["a"])
    assert feed.wanted() == 2
    feed.end("a", EndSession(reward=1.0))
    assert going_on.ended.result().reward == 1.0


async def test_the_first_end_counts_and_is_remembered() -> None:
    feed = Feed()
    asker = feed.join(1)
    ending = offer(feed, "a")
    with pytest.raises(CallRefused, match="was not taken"):
        feed.end("a", EndSession())
    asker.fetch()
    feed.end("a", EndSession(reward=1.0))
    feed.end("a", EndSession(reward=0.0))
    assert ending.ended.result().reward == 1.0
    assert feed.outcome("a") is None
    feed.over("a", accepted=False, reason="late")
    outcome = feed.outcome("a")
    assert outcome is not None
    assert (outcome.accepted, outcome.reason) == (False, "late")
    feed.over("a", accepted=True)  # it is over already
    assert feed.outcome("a") is outcome


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    feed = Feed()
    for session in ("a", "b", "c"):
        offer(feed, session)
        feed.over(session, accepted=True)
    assert [feed.outcome(session) is not None for session in ("a", "b", "c")] == [False, True, True]


async def test_askers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ASKERS", 1)
    feed = Feed()
    feed.join(1)
    with pytest.raises(QueueFull):
        feed.join(1)


async def test_after_the_run_nobody_gets_a_task() -> None:
    feed = Feed()
    asker = feed.join(1)
    feed.close()
    assert asker.news.is_set()
    with pytest.raises(CallRefused) as refused:
        feed.join(1)
    assert refused.value.status == 410


@settings(max_examples=repetitions(50, 150), deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_any_history_gives_each_task_once(seed: int) -> None:
    """Joins, leaves, offers, fetches and ends in any order: no task twice, none lost, no hand counted twice."""
    draw, feed = random.Random(seed), Feed()
    askers: dict[Asker, int] = {}
    taken: Counter[str] = Counter()
    offered: set[str] = set()
    holders: dict[str, Asker] = {}
    for step in range(60):
        match draw.choice(("join", "leave", "offer", "offer", "fetch", "fetch", "end")):
            case "join":
                capacity = draw.randint(1, 3)
                askers[feed.join(capacity)] = capacity
            case "leave" if askers:
                gone = draw.choice(list(askers))
                feed.leave(gone)
                del askers[gone]
                holders = {session: asker for session, asker in holders.items() if asker is not gone}
            case "offer":
                offered.add(f"s{step}")
                offer(feed, f"s{step}")
            case "fetch" if askers:
                asker = draw.choice(list(askers))
                session = fetched(asker)
                if session is not None:
                    taken[session] += 1
                    holders[session] = asker
            case "end" if holders:
                session = draw.choice(list(holders))
                feed.over(session, accepted=True)
                del holders[session]
        for asker, capacity in askers.items():
            held = sum(holder is asker for holder in holders.values())
            assert asker.free + len(asker.given) + held == capacity
    assert set(taken.values()) <= {1}
    last = feed.join(len(offered) + 1)
    on_their_way = {one.session for asker in askers for one in asker.given}
    while (session := fetched(last)) is not None:
        taken[session] += 1
    assert set(taken) | on_their_way == offered
    assert sum(taken.values()) + len(on_their_way) == len(offered)
