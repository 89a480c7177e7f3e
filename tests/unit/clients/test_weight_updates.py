"""How an engine announces changes of its weights: waits are bounded, turns given back, downloads renewed."""

from __future__ import annotations

import asyncio

import pytest

from rillflow.clients import dataflow
from rillflow.clients.dataflow import EngineTurn, FetchWord
from rillflow.errors import DeadlineExceeded, RillflowError, Unavailable
from rillflow.types import Ack, AskTurn, TellFetch, TurnReply


class Book:
    """Gives scripted answers; time passes with every call."""

    def __init__(self, *answers: bool | RillflowError) -> None:
        self.answers = list(answers)
        self.asked: list[AskTurn] = []
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def __call__(self, ask: AskTurn, deadline: float) -> TurnReply:
        self.asked.append(ask)
        self.time += 1.0
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, RillflowError):
            raise answer
        return TurnReply(granted=answer)

    @property
    def done(self) -> list[bool]:
        return [ask.done for ask in self.asked]


def turn(book: Book) -> EngineTurn:
    return EngineTurn(book, "p", "e", book)


async def test_it_waits_until_it_may_and_says_when_it_is_done() -> None:
    book = Book(False, False, True)
    async with turn(book)():
        assert book.done == [False] * 3
    assert book.done == [False, False, False, True]
    assert {(ask.policy, ask.engine) for ask in book.asked} == {("p", "e")}


async def test_it_is_done_also_when_the_change_failed() -> None:
    book = Book(True)
    with pytest.raises(ValueError, match="refused"):
        async with turn(book)():
            raise ValueError("refused")
    assert book.done == [False, True]


async def test_without_an_answer_it_goes_ahead() -> None:
    book = Book(DeadlineExceeded("nobody is there"))
    async with turn(book)():
        pass
    assert book.done == [False]  # and nothing is given back that was not got


async def test_it_goes_ahead_when_others_are_first_for_too_long() -> None:
    book = Book()
    async with turn(book)():
        pass
    assert book.time == dataflow.LONGEST
    assert not any(book.done)


async def test_that_it_cannot_say_that_it_is_done_hurts_nobody() -> None:
    book = Book(True, DeadlineExceeded("nobody is there"))
    async with turn(book)():
        pass
    assert book.done == [False, True]


async def test_a_long_change_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataflow, "_RENEW_TURN", 0.001)
    book = Book(True, True, DeadlineExceeded("once not"), True)
    async with turn(book)(), asyncio.timeout(20):
        while len(book.asked) < 4:  # noqa: ASYNC110 - what is waited for is a count, not an event
            await asyncio.sleep(0.001)
        assert not any(book.done)
    assert book.done[-1]


async def test_it_is_said_before_and_renewed_meanwhile(monkeypatch):
    monkeypatch.setattr(dataflow, "RENEW_FETCH", 0.01)
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
