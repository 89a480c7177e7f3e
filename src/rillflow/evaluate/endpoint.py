"""One episode against any OpenAI-compatible endpoint, reported call by call as `trial` reports those of an engine.

    agent ──▶ Forwarder, on loopback ──▶ endpoint

The agent talks to the forwarder as it would to the gateway: by the same paths, with a key of its own. A request goes on
as it is except for `model`: the recipe's sampling settings do not apply, and the agent sees the endpoint's errors. The
endpoint's tokens and log-probs are unknown here, so such an episode can be read and rewarded, but not trained on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_urlsafe
from statistics import fmean
from typing import Any

import aiohttp
import msgspec

from rillflow.agents.rewards.base import Given
from rillflow.config import GatewayConfig, Recipe, SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.errors import BadRequest, RillflowError, Unavailable
from rillflow.evaluate.playing import Ended, Outcome, Tell, Turn
from rillflow.evaluate.provider_answers import Said, read_stream, read_whole
from rillflow.gateway.control import ControlRoutes, GiveReward, Rewarded
from rillflow.gateway.dialects import ASKING, DIALECTS, Dialect, dialect_of, in_session
from rillflow.gateway.feed import Feed
from rillflow.gateway.server import agent_of, anthropic_url, presented_key
from rillflow.gateway.trees.messages import Message, message
from rillflow.rollout.cast import Cast, open_cast
from rillflow.rollout.episode import EpisodeFailed, RunningEpisode, score
from rillflow.rollout.players import Played
from rillflow.rollout.rewards import RewardRules
from rillflow.types import EpisodeFacts, Task
from rillflow.types.base import json_decoder
from rillflow.types.routes import JSON
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response, Send, Stream
from rillflow.wire.server import Endpoint, error_headers

_V1 = "/v1"
_MOST = 64 << 20  # bytes of one answer that are looked at; more of it only pass through


@dataclass(frozen=True)
class Upstream:
    """An endpoint: its base URL as clients want it (`https://host/v1`), the model to ask for and the key to send."""

    url: str
    model: str
    key: str = ""


async def try_endpoint(recipe: Recipe, task: Task, folder: Path, tell: Tell, upstream: Upstream) -> Outcome:
    """Play one episode whose calls the endpoint answers, whatever policy they name; `folder` is for commands."""
    async with (
        open_cast(recipe, Feed(), folder) as cast,
        aiohttp.ClientSession(trust_env=True, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as client,
    ):
        await cast.prepare()
        forwarder = Forwarder(recipe, upstream, client, tell)
        url = await forwarder.start()
        try:
            ended = await _play(cast, task, forwarder, url)
        finally:
            await forwarder.stop()
    ended = replace(ended, errors=cast.surroundings.errors.take())
    return Outcome(ended, forwarder.calls, forwarder.paths(), forwarder.forks)


async def _play(cast: Cast, task: Task, forwarder: Forwarder, url: str) -> Ended:
    recipe, clock = cast.recipe, SystemClock()
    begun = clock.now()

    def opened() -> RunningEpisode:
        return RunningEpisode(
            task,
            client=cast.client,
            policies=list(recipe.policies),
            url=anthropic_url(url, task.id),
            api_key=forwarder.key,
            clock=clock,
            seconds=recipe.rollout.episode_timeout,
            give=forwarder.give,
            surroundings=cast.surroundings,
        )

    try:
        try:
            played = await cast.player.play(task.id, opened)
        except EpisodeFailed as failure:
            end = RewardRules.of(recipe).end(failure.cause, failure.detail) if forwarder.calls else None
            if end is None:
                raise
            name, worth = end
            return Ended(rewards=dict.fromkeys(recipe.policies, worth), error=f"ended without an answer: {name}")
        metrics = dict(played.metrics)
        seconds = clock.now() - begun
        rewards = await _rewards(cast, task, played, forwarder, metrics=metrics, seconds=seconds)
    except EpisodeFailed as failure:
        return Ended.failed(failure)
    return Ended(answer=played.answer, rewards=rewards, metrics=metrics, seconds=seconds)


async def _rewards(
    cast: Cast, task: Task, played: Played, forwarder: Forwarder, *, metrics: dict[str, float], seconds: float
) -> Mapping[str, float]:
    """Return the reward of each policy: from the recipe's function, from the player, or as given."""
    policies, limit = list(cast.recipe.policies), cast.recipe.rollout.reward_timeout
    facts = EpisodeFacts(
        task=task.id,
        prompt=task.prompt.id,
        policies=policies,
        seed=task.seed,
        evaluating=task.lane == "eval",
        seconds=seconds,
    )
    if cast.reward is not None:
        given = Given(
            task.prompt.payload, played.answer, read=forwarder.messages, metrics=played.metrics, episode=facts
        )
        return await score(cast.reward, given, limit, policies, metrics=metrics)
    if played.reward is not None:
        return await score(None, Given(task.prompt.payload, played.reward), limit, policies, metrics=metrics)
    if not forwarder.gifts:
        raise EpisodeFailed("reward_error", "no reward: none was returned or given to the session")
    return dict.fromkeys(policies, fmean(forwarder.gifts))


@dataclass
class _Path:
    """A conversation: its messages, and of how many the first are those of another path."""

    messages: list[Message]
    follows: int | None = None
    shared: int = 0
    policy: str = ""
    agent: str = ""
    finish: str = ""
    fork: str = ""

    def entry(self) -> dict[str, Any]:
        """Return it as `SessionRecord.transcript` has it."""
        entry = {
            "policy": self.policy,
            "follows": self.follows,
            "shared": self.shared,
            "fork": self.fork,
            "finish": self.finish,
            "messages": [one.body for one in self.messages[self.shared :]],
        }
        return entry | ({"agent": self.agent} if self.agent else {})


class Forwarder(Service):
    """Sends the calls of one session on, and tells what was asked and answered."""

    def __init__(self, recipe: Recipe, upstream: Upstream, client: aiohttp.ClientSession, tell: Tell) -> None:
        self.key = token_urlsafe(32)
        super().__init__("endpoint", token_urlsafe(32))
        self.calls = 0
        self.forks: list[str] = []
        self.gifts: list[float] = []
        self._paths: list[_Path] = []
        self._policies = list(recipe.policies)
        self._upstream = upstream
        self._client = client
        self._tell = tell
        self._limits: GatewayConfig = recipe.gateway
        for dialect in DIALECTS:
            for route in (ASKING[dialect.PATH], in_session(ASKING[dialect.PATH])):
                self.raw(route, self._asking(dialect))
        self.raw(ControlRoutes.reward, self._reward)

    def presented(self, request: Request) -> str:
        return presented_key(request)

    def opens(self, path: str, presented: str) -> bool:
        return presented == self.key

    def error_response(self, error: RillflowError, request: Request) -> Response:
        body = dialect_of(request).error_body(error)
        return Response(msgspec.json.encode(body), error.status, error_headers(error), JSON)

    def paths(self) -> list[dict[str, Any]]:
        return [path.entry() for path in self._paths]

    def messages(self) -> list[dict[str, Any]]:
        """Return copies of all messages, each once."""
        return deepcopy([message for path in self.paths() for message in path["messages"]])

    def give(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> None:
        """Take a reward; which part of the episode it is of makes no difference here: nothing trains on it."""
        self.gifts.append(float(value))

    async def _reward(self, request: Request) -> Response:
        raw = await request.read(self._limits.body)
        try:
            gift = json_decoder(GiveReward).decode(raw)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"reward: {error}", "send JSON with a `value`") from error
        self.give(gift.value)
        return Response(msgspec.json.encode(Rewarded(session=request.params["session"])), media_type=JSON)

    # ------------------------------------------------------------ calls

    def _asking(self, dialect: Dialect) -> Endpoint:
        async def ask(request: Request) -> Response:
            raw = await request.read(self._limits.body)
            try:
                body = msgspec.json.decode(raw, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise BadRequest(f"the body is not a JSON object: {error}", "send what the provider takes") from error
            self.calls += 1
            asked = _Asked(dialect, self._history(dialect, raw), self._policy(body), agent_of(request))
            answer = await self._send(dialect.PATH, body | {"model": self._upstream.model}, request)
            if body.get("stream"):
                return _PassedOn(self._passed_on(answer, asked), answer)
            data = await answer.read()
            if answer.ok:
                self._hear(asked, read_whole(dialect, data))
            return Response(data, answer.status, media_type=answer.content_type)

        return ask

    async def _send(self, path: str, body: dict[str, Any], request: Request) -> aiohttp.ClientResponse:
        url = self._upstream.url.rstrip("/").removesuffix(_V1) + path
        headers = {name: value for name, value in request.headers.items() if name.startswith(("anthropic-", "openai-"))}
        if self._upstream.key:
            headers |= {"authorization": f"Bearer {self._upstream.key}", "x-api-key": self._upstream.key}
        try:
            return await self._client.post(url, json=body, headers=headers)
        except aiohttp.ClientError as error:
            raise Unavailable(f"the endpoint {url} does not answer: {error}", "check --endpoint") from error

    async def _passed_on(self, answer: aiohttp.ClientResponse, asked: _Asked) -> AsyncGenerator[bytes]:
        """Yield the stream as it comes, and report the call once it has ended."""
        parts: list[bytes] = []
        size = 0
        async for part in answer.content.iter_any():
            size += len(part)
            if size <= _MOST:
                parts.append(part)
            yield part
        if answer.ok and size <= _MOST:
            self._hear(asked, read_stream(asked.dialect, b"".join(parts)))

    def _history(self, dialect: Dialect, raw: bytes) -> list[Message]:
        """Return the messages of a request; none of one that only the endpoint understands."""
        try:
            call = dialect.to_call(dialect.decode(raw, self._limits), SamplingConfig())
        except RillflowError:
            return []
        return list(call.history) if call.prompt is None else [message("user", str(call.prompt))]

    def _policy(self, body: Mapping[str, Any]) -> str:
        named = body.get("model")
        return named if isinstance(named, str) and named in self._policies else self._policies[0]

    # ------------------------------------------------------------ reporting

    def _hear(self, asked: _Asked, read: Said) -> None:
        for answer, finish in read.choices:
            at, shared = self._nearest(asked.history)
            fork = ""
            if at is None or shared < len(self._paths[at].messages):
                fork = "" if at is None or shared == len(asked.history) else f"messages[{shared}] differs"
                self.forks += [fork] if fork else []
                self._paths.append(_Path([], at if shared else None, shared))
                at = len(self._paths) - 1
            path = self._paths[at]
            path.messages = [*asked.history, answer]
            path.policy, path.agent, path.finish, path.fork = asked.policy, asked.agent, finish, fork
            self._tell(
                Turn(
                    policy=asked.policy,
                    agent=asked.agent,
                    given=[one.body for one in asked.history[shared:]],
                    answer=answer.body,
                    finish=finish,
                    begins=not shared,
                    fork=fork,
                    prompt=read.prompt,
                    sampled=read.sampled,
                )
            )

    def _nearest(self, history: Sequence[Message]) -> tuple[int | None, int]:
        """Return the path that shares most messages with a history, and how many those are."""
        found = [(_shared(path.messages, history), number) for number, path in enumerate(self._paths)]
        shared, number = max(found, default=(0, None))
        return number, shared


class _PassedOn(Stream):
    """An endpoint's stream, as it comes."""

    def __init__(self, pieces: AsyncGenerator[bytes], answer: aiohttp.ClientResponse) -> None:
        super().__init__(status=answer.status, media_type=answer.content_type)
        self._pieces = pieces
        self._answer = answer

    async def write(self, send: Send) -> None:
        try:
            async with aclosing(self._pieces):
                async for piece in self._pieces:
                    await send(piece)
        finally:
            self._answer.close()


@dataclass(frozen=True)
class _Asked:
    dialect: Dialect
    history: list[Message]
    policy: str
    agent: str


def _shared(old: Sequence[Message], new: Sequence[Message]) -> int:
    count = 0
    for one, other in zip(old, new, strict=False):
        if one.key not in (other.key, other.unnamed):
            break
        count += 1
    return count
