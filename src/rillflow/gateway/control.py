"""The routes beside the dialects: rewards over HTTP, and sessions for agents from outside.

The recipe's reward is final. If the recipe has a reward function, rewards over HTTP are refused. Else the node's token
may give them, and a session's own key only if the recipe says `rewards: agent`. This holds for `/reward` and for the
reward in `/end`. Refused rewards are counted with the session.

A session is ended with its own key or the node's token; tasks are handed out for the node's token only. Everything that
is acknowledged here is on disk first: a task's session before its key is sent, a reward, an end. An end is answered
once the run has accepted or refused the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from rillflow.gateway.dialects import SESSION
from rillflow.gateway.feed import Asker, Ended, EndSession, Feed, OutsideTask, run_ended
from rillflow.gateway.server import Gateway
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.shapes import CallRefused, ErrorAnswer
from rillflow.types.base import json_decoder
from rillflow.types.routes import JSON, raw
from rillflow.wire.messages import Request, Response, Send, Stream

Body = TypeVar("Body")
Givers = Literal["nobody", "run", "agent"]

LONGEST_WAIT = 300.0  # of one request for a task
END_SECONDS = 300.0  # for the run to accept an episode
KEEP_ALIVE = 5.0  # between two empty lines on a quiet feed
SAID = "said"  # the key of a session's detail that holds the end its agent sent
NDJSON = "application/x-ndjson"
_ERRORS = (ErrorAnswer,)


class GiveReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward for one answer (`call`: the id that the agent saw), for the answers of the n-th call (`turn`, from 0),
    for one leaf of a policy's tree, or else for the whole session."""

    value: float
    call: str | None = None
    turn: int | None = None
    leaf: int | None = None
    policy: str | None = None


class Rewarded(msgspec.Struct, frozen=True, kw_only=True):
    session: str


class TakeTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request one task, and wait up to `wait` seconds for it."""

    wait: float = 0.0


class ControlRoutes:
    """Rewards over HTTP, and sessions for agents from outside."""

    reward = raw(
        "POST", f"{SESSION}/reward", "node", summary="Give a reward to a session or a part of it", body=GiveReward,
        again="sets the reward of what it names", answers={JSON: (Rewarded,)}, errors=_ERRORS,
    )  # fmt: skip
    end = raw(
        "POST", f"{SESSION}/end", "node", summary="End a session that was taken from the feed", body=EndSession,
        again="the first end counts, and its outcome is repeated", answers={JSON: (Ended,)}, errors=_ERRORS,
    )  # fmt: skip
    sessions = raw(
        "POST", "/sessions", "node", summary="Take one task, if one comes in time", body=TakeTask, waits=True,
        again="a task whose agent does not end it is played again after its deadline",
        answers={JSON: (OutsideTask,)}, errors=_ERRORS, optional=True,
    )  # fmt: skip
    feed = raw(
        "GET", "/feed", "node", summary="A stream of tasks, one JSON object a line, as slots become free", waits=True,
        answers={NDJSON: (OutsideTask,)}, errors=_ERRORS, query=("capacity", "playing"),
    )  # fmt: skip


class Control:
    """Adds the routes to a gateway that has not started. `on_reward` is called with the id of a rewarded session.

    `givers` says who may give rewards (`Recipe.reward_givers`).
    """

    def __init__(self, gateway: Gateway, feed: Feed, on_reward: Callable[[str], None], givers: Givers = "run") -> None:
        self._gateway = gateway
        self._feed = feed
        self._on_reward = on_reward
        self._givers = givers
        gateway.raw(ControlRoutes.reward, self._reward)
        gateway.raw(ControlRoutes.end, self._end)
        gateway.raw(ControlRoutes.sessions, self._take)
        gateway.raw(ControlRoutes.feed, self._stream)

    async def _reward(self, request: Request) -> Response:
        self._check_giver(request, self._gateway.session_of(request))
        gift = await self._body(request, GiveReward)
        session = self._gateway.session_of(request)  # again, because it may have been closed while the body was read
        await session.reward(gift.value, call=gift.call, turn=gift.turn, leaf=gift.leaf, policy=gift.policy)
        self._on_reward(session.id)
        return _json(Rewarded(session=session.id))

    async def _end(self, request: Request) -> Response:
        said = await self._body(request, EndSession)
        known = self._feed.outcome(request.params["session"])
        if known is not None:
            return _json(known)
        session = self._gateway.session_of(request)
        if said.reward is not None:
            self._check_giver(request, session)
        offer = self._feed.end(session.id, said)
        if offer.ended.result() is said:  # the first end; it is kept, so that a gateway that restarts carries it out
            self._gateway.sessions.note(session.id, {**session.detail, SAID: msgspec.to_builtins(said)})
            self._gateway.sessions.end(session.id)
        await self._gateway.sessions.log.synced()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await offer.over.wait()
        ended = self._feed.outcome(session.id)
        if ended is None:
            raise CallRefused("the run has not accepted the episode yet: ask again", status=503, code="not_taken_yet")
        return _json(ended)

    def _check_giver(self, request: Request, session: Session) -> None:
        """Refuse a reward that does not count, and count the attempt."""
        if self._givers == "agent" or (self._givers == "run" and request.scope is not None):
            return
        session.rewards_refused += 1
        if self._givers == "nobody":
            why = "the recipe's `reward` function gives the rewards; they are accepted over HTTP only "
            why += "if the recipe has no `reward`"
        else:
            why = "a session's key may not give rewards; set `rewards: agent` in the recipe, or send the node's token"
        raise CallRefused(f"this reward does not count: {why}", status=403, code="reward_refused")

    async def _take(self, request: Request) -> Response:
        ask = await self._body(request, TakeTask)
        asker = self._feed.join(1)
        try:
            await request.while_connected(lambda: _news(asker, min(max(ask.wait, 0.0), LONGEST_WAIT)))
            if self._feed.closed:
                raise run_ended()
            task = await self._fetched(asker)
        finally:
            self._feed.leave(asker)
        return Response(status=204) if task is None else _json(task)

    async def _fetched(self, asker: Asker) -> OutsideTask | None:
        """Take the next task, if any. Its session is on disk before its key is sent."""
        task = asker.fetch()
        if task is not None:
            await self._gateway.sessions.log.synced()
        return task

    async def _stream(self, request: Request) -> Response:
        capacity = _capacity(request.query_value("capacity", "1"), self._gateway.limits.sessions)
        asker = self._feed.join(capacity, request.query.get("playing", []))
        return _FeedStream(self._feed, asker, lambda: self._fetched(asker))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        raw = await request.read(self._gateway.limits.body)
        try:
            return json_decoder(kind).decode(raw or b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CallRefused(f"the body is not a {kind.__name__}: {error}", code="invalid_request") from error


class _FeedStream(Stream):
    """Tasks as lines of JSON until the run ends or the agent goes, with empty lines to keep the connection alive."""

    def __init__(self, feed: Feed, asker: Asker, fetched: Callable[[], Awaitable[OutsideTask | None]]) -> None:
        super().__init__(media_type=NDJSON, headers={"cache-control": "no-cache"})
        self._feed = feed
        self._asker = asker
        self._fetched = fetched

    async def write(self, send: Send) -> None:
        try:
            while not self._feed.closed:
                await _news(self._asker, KEEP_ALIVE)
                task = None if self._feed.closed else await self._fetched()
                await send(b"\n" if task is None else msgspec.json.encode(task) + b"\n")
        finally:
            self._feed.leave(self._asker)


async def _news(asker: Asker, seconds: float) -> None:
    """Wait until the asker can fetch a task or the run has ended, for at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asker.news.wait()


def _capacity(text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise CallRefused(f"capacity must be a number from 1 to {most}", param="capacity")
    return int(text[:9])


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
