"""The feed: tasks go to agents from outside as fast as they have hands free, and no faster.

An agent asks for tasks through an `Asker` with so many free hands. Each offered task goes to exactly one asker; one
that an asker has not fetched when it leaves goes to the next. Nothing is leased that nobody asks for: `wanted` is the
number of free hands that no task is on its way to. A hand is free again once its session is over.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rillflow.errors import QueueFull
from rillflow.gateway.failures import CallRefused
from rillflow.types import Prompt

MOST_ASKERS = 1024
REMEMBERED = 4096  # ends, for agents that ask again because they did not hear the answer


class OutsideTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task in an agent's hands: its session at the gateway, with `seconds` left until it is cut."""

    session: str
    api_key: str
    base_url: str
    anthropic_url: str
    model: str
    policies: list[str]
    prompt: Prompt
    seed: int
    seconds: float


class EndSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent has done its task. `answer` is for the recipe's reward function; `error` says why it could not."""

    reward: float | dict[str, float] | None = None
    answer: Any = None
    error: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the episode counts, and if not, why."""

    session: str
    accepted: bool
    reason: str = ""


class Offer:
    """One task on its way: offered, taken by an agent, ended by it, over once its end is told to the run."""

    def __init__(self, session: str, open_session: Callable[[], OutsideTask]) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.taken: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[EndSession] = loop.create_future()
        self.over = asyncio.Event()
        self.asker: Asker | None = None
        self._open = open_session

    def take(self) -> OutsideTask:
        """Its session begins now."""
        task = self._open()
        if not self.taken.done():
            self.taken.set_result(None)
        return task


class Asker:
    """An agent, or a fleet of them, that asks for tasks. `given` is what it has not fetched yet, `news` that it can."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.given: deque[Offer] = deque()
        self.news = asyncio.Event()

    def give(self, offer: Offer) -> None:
        offer.asker = self
        self.free -= 1
        self.given.append(offer)
        self.news.set()

    def fetch(self) -> OutsideTask | None:
        """The next task, if there is one: it is taken now."""
        task = self.given.popleft().take() if self.given else None
        if not self.given:
            self.news.clear()
        return task


class Feed:
    """All askers and offers of one node. `on_ask` is told when somebody wants a task."""

    def __init__(self) -> None:
        self.on_ask: Callable[[], None] = lambda: None
        self.closed = False
        self._askers: deque[Asker] = deque()
        self._offers: dict[str, Offer] = {}
        self._waiting: deque[Offer] = deque()  # for an asker
        self._recent: OrderedDict[str, Ended] = OrderedDict()

    # ------------------------------------------------------------ the node's side

    def wanted(self) -> int:
        return sum(max(asker.free, 0) for asker in self._askers)

    def offer(self, session: str, open_session: Callable[[], OutsideTask]) -> Offer:
        offer = self._offers[session] = Offer(session, open_session)
        self._waiting.append(offer)
        self._match()
        return offer

    def go_on(self, session: str) -> Offer:
        """A session that an agent took from the node before this one; asked again, it is the same offer."""
        offer = self._offers.get(session)
        if offer is None:
            offer = self._offers[session] = Offer(session, _taken_before)
            offer.taken.set_result(None)
        return offer

    def over(self, session: str, *, accepted: bool, reason: str = "") -> None:
        """The run has been told of the session's end, or wants it no more."""
        offer = self._offers.pop(session, None)
        if offer is None:
            return
        self._recent[session] = Ended(session=session, accepted=accepted, reason=reason)
        while len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)
        offer.over.set()
        if offer in self._waiting:
            self._waiting.remove(offer)
        if offer.asker is not None:
            if offer in offer.asker.given:
                offer.asker.given.remove(offer)
            offer.asker.free += 1
            self._match()

    def close(self) -> None:
        """The run has ended: nobody gets a task any more."""
        self.closed = True
        for asker in self._askers:
            asker.news.set()

    # ------------------------------------------------------------ the agents' side

    def join(self, capacity: int, playing: Iterable[str] = ()) -> Asker:
        """Ask for as many tasks at a time as `capacity`, less those that the agent is `playing` already."""
        if self.closed:
            raise run_ended()
        if len(self._askers) >= MOST_ASKERS:
            raise QueueFull(f"{MOST_ASKERS} agents ask for tasks already", "let one agent ask for more at once")
        asker = Asker(capacity)
        for session in playing:
            offer = self._offers.get(session)
            if offer is not None and offer.asker is None:
                offer.asker = asker
                asker.free -= 1
        self._askers.append(asker)
        self._match()
        return asker

    def leave(self, asker: Asker) -> None:
        """What it has not fetched goes to another; what it has taken goes on without it."""
        self._askers.remove(asker)
        asker.free = 0
        self._waiting.extendleft(reversed(asker.given))
        for offer in self._offers.values():
            if offer.asker is asker:
                offer.asker = None
        self._match()

    def outcome(self, session: str) -> Ended | None:
        """What became of a session that is over, as long as it is remembered."""
        return self._recent.get(session)

    def end(self, session: str, said: EndSession) -> Offer:
        """The agent has ended its session; the first word counts."""
        offer = self._offers.get(session)
        if offer is None or not offer.taken.done():
            raise CallRefused(
                f"session {session!r} was not taken from the feed: its own workflow or command ends it",
                status=409,
                code="not_an_outside_session",
            )
        if not offer.ended.done():
            offer.ended.set_result(said)
        return offer

    # ------------------------------------------------------------ bringing both together

    def _match(self) -> None:
        while self._waiting and (asker := self._next()) is not None:
            asker.give(self._waiting.popleft())
        if self.wanted():
            self.on_ask()

    def _next(self) -> Asker | None:
        """The next in turn with a hand free."""
        for _ in range(len(self._askers)):
            self._askers.rotate(-1)
            if self._askers[-1].free > 0:
                return self._askers[-1]
        return None


def run_ended() -> CallRefused:
    return CallRefused("the run has ended: there are no more tasks", status=410, code="run_ended")


def _taken_before() -> OutsideTask:
    raise AssertionError("a session that goes on is never given again")
