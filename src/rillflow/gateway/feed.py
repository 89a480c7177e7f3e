"""The feed: tasks for agents from outside, which take them at their own pace.

An agent requests tasks through an `Asker` with a number of free slots. Each offered task goes to exactly one asker; a
task that an asker has not fetched when it leaves goes to the next. `wanted` is the number of free slots without a task,
and the node leases no more tasks than that. A slot is free again once its session is over.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rillflow.errors import QueueFull
from rillflow.gateway.shapes import CallRefused
from rillflow.types import Prompt

MOST_ASKERS = 1024
REMEMBERED = 4096  # ended sessions, for agents that repeat a request whose answer was lost


class OutsideTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task for an agent: its session at the gateway, which ends after `seconds`."""

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
    """The end of a task. `answer` is for the recipe's reward function; `error` says why the agent failed."""

    reward: float | dict[str, float] | None = None
    answer: Any = None
    error: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session: whether the run accepted the episode, and why not."""

    session: str
    accepted: bool
    reason: str = ""


class Offer:
    """One task: offered, taken by an agent, ended by the agent, and over once the run knows of its end."""

    def __init__(self, session: str, open_session: Callable[[], OutsideTask]) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.taken: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[EndSession] = loop.create_future()
        self.over = asyncio.Event()
        self.asker: Asker | None = None
        self._open = open_session

    def take(self) -> OutsideTask:
        """Open the session of the task."""
        task = self._open()
        if not self.taken.done():
            self.taken.set_result(None)
        return task


class Asker:
    """An agent, or several behind one connection. `given` are tasks to fetch; `news` is set while there are some."""

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
        """Take the next task; None if none is given."""
        task = self.given.popleft().take() if self.given else None
        if not self.given:
            self.news.clear()
        return task


class Feed:
    """All askers and offers of one node. `on_ask` is called when an asker has free slots."""

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
        """Return the offer of a session that an agent took before the node restarted."""
        offer = self._offers.get(session)
        if offer is None:
            offer = self._offers[session] = Offer(session, _taken_before)
            offer.taken.set_result(None)
        return offer

    def over(self, session: str, *, accepted: bool, reason: str = "") -> None:
        """Close the offer of a session: the run knows of its end, or no longer needs it."""
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
        """Hand out no more tasks; the run has ended."""
        self.closed = True
        for asker in self._askers:
            asker.news.set()

    # ------------------------------------------------------------ the agents' side

    def join(self, capacity: int, playing: Iterable[str] = ()) -> Asker:
        """Add an asker for `capacity` tasks at a time, minus those that the agent is already `playing`."""
        if self.closed:
            raise run_ended()
        if len(self._askers) >= MOST_ASKERS:
            raise QueueFull(f"{MOST_ASKERS} agents already request tasks", "let one agent request more at once")
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
        """Remove an asker. Tasks that it has not fetched go to others; those that it has taken continue."""
        self._askers.remove(asker)
        asker.free = 0
        self._waiting.extendleft(reversed(asker.given))
        for offer in self._offers.values():
            if offer.asker is asker:
                offer.asker = None
        self._match()

    def outcome(self, session: str) -> Ended | None:
        """Return the outcome of a recent session that is over; else None."""
        return self._recent.get(session)

    def end(self, session: str, said: EndSession) -> Offer:
        """Record the end of a session and return its offer. Only the first end counts."""
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

    # ------------------------------------------------------------ matching

    def _match(self) -> None:
        while self._waiting and (asker := self._next()) is not None:
            asker.give(self._waiting.popleft())
        if self.wanted():
            self.on_ask()

    def _next(self) -> Asker | None:
        """Return the next asker in turn with a free slot."""
        for _ in range(len(self._askers)):
            self._askers.rotate(-1)
            if self._askers[-1].free > 0:
                return self._askers[-1]
        return None


def run_ended() -> CallRefused:
    return CallRefused("the run has ended: there are no more tasks", status=410, code="run_ended")


def _taken_before() -> OutsideTask:
    raise AssertionError("a session that was taken before the restart is never offered")
