"""The word around a download: said at once, again and again, and never in the way."""

from __future__ import annotations

import asyncio

from rillflow.clients import fetching as module
from rillflow.clients.fetching import FetchWord
from rillflow.errors import Unavailable
from rillflow.types import Ack, TellFetch


async def test_it_is_said_before_and_renewed_meanwhile(monkeypatch):
    monkeypatch.setattr(module, "RENEW", 0.01)
    said: list[TellFetch] = []
    again = asyncio.Event()

    async def tell(news: TellFetch, deadline: float) -> Ack:
        said.append(news)
        if len(said) > 2:
            again.set()
        return Ack(accepted=True)

    async with FetchWord(tell, "agent", "node")(5):
        assert len(said) == 1
        await asyncio.wait_for(again.wait(), 60)
    count = len(said)
    await asyncio.sleep(0.05)
    assert len(said) == count
    assert set(said) == {TellFetch(policy="agent", engine="node", version=5)}


async def test_without_an_answer_it_is_fetched_all_the_same():
    async def tell(news: TellFetch, deadline: float) -> Ack:
        raise Unavailable("away")

    async with FetchWord(tell, "agent", "node")(5):
        fetched = True
    assert fetched
