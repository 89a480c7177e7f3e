"""Versions that engines fetch stay in the store: the announcement counts for a while."""

from __future__ import annotations

import pytest
from dataflow_server import served

from dataflow_world import POLICY, FakeClock
from rillflow.errors import BadRequest
from rillflow.types import TellFetch
from rillflow.weights import updates as module
from rillflow.weights.updates import FETCH_SECONDS, Fetches


def word(version: int, engine: str = "e", policy: str = POLICY) -> TellFetch:
    return TellFetch(policy=policy, engine=engine, version=version)


def test_a_word_counts_until_its_time_is_over_or_the_next_one_comes():
    clock = FakeClock()
    fetches = Fetches(clock)
    fetches.tell(word(3))
    fetches.tell(word(5, engine="other"))
    clock.time += FETCH_SECONDS - 1
    assert sorted(fetches.versions(POLICY)) == [3, 5]
    fetches.tell(word(4))
    clock.time += 2
    assert fetches.versions(POLICY) == [4]
    assert fetches.versions("another") == []


@pytest.mark.parametrize("news", [word(-1), word(1, engine=""), word(1, engine="e" * 201)])
def test_nonsense_is_refused(news):
    with pytest.raises(BadRequest):
        Fetches().tell(news)


def test_there_is_a_bound(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    fetches = Fetches(FakeClock())
    fetches.tell(word(1, "a"))
    fetches.tell(word(1, "b"))
    fetches.tell(word(2, "b"))
    with pytest.raises(BadRequest, match="fetching already"):
        fetches.tell(word(1, "c"))


async def test_what_is_fetched_counts_as_in_use(tmp_path):
    async with served(tmp_path) as run:
        assert await run.client.versions_in_use(POLICY) == []
        await run.client.fetching(word(7))
        assert await run.client.versions_in_use(POLICY) == [7]
        with pytest.raises(BadRequest, match="unknown policy"):
            await run.client.fetching(word(7, policy="nobody"))
