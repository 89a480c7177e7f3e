"""Plays episodes without a run: a recipe's gateway, tools, environments and engines in this process.

The code of a rollout node plays, rewards and records an episode (`rollout.episodes`), without leases: the result is not
pushed but returned to the caller. `try_policy` plays one episode for `rillflow try` and reports each answer as soon as
it has ended, before the agent sees it, with the messages of the agent and its tools since the call before. Nothing is
stored or trained on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from rillflow.config import Recipe, ResourcesConfig, RuntimeConfig
from rillflow.config.tracebacks import Tracebacks, UserErrors
from rillflow.contracts import SystemClock
from rillflow.engine.build import build_engine
from rillflow.engine.host import EngineHost
from rillflow.gateway.control import Control
from rillflow.gateway.feed import Feed
from rillflow.gateway.node_engines import NodeEngines
from rillflow.gateway.sessions.events import Asked, NoSessionLog, SessionLog
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.messages import Body
from rillflow.gateway.trees.record import Sample, SessionRecord, cause, forks
from rillflow.gateway.trees.tree import Node
from rillflow.rollout.cast import build_gateway, open_cast
from rillflow.rollout.episode import EpisodeFailed
from rillflow.rollout.episodes import Episodes
from rillflow.rollout.loading import refuse_outside
from rillflow.rollout.players import Open, Played, Player
from rillflow.rollout.rewards import LateRewards
from rillflow.types import Ack, Task, TaskLease, UserError

NAME = "evaluation"


@dataclass(frozen=True)
class Ended:
    """The end of an episode: its result and its rewards, the trajectory's first; or the `cause` of its failure.

    `trace` is the traceback of user code that failed the episode, `errors` are those that it survived.
    """

    answer: Any = None
    record: SessionRecord | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cause: str = ""
    error: str = ""
    trace: str = ""
    errors: Sequence[UserError] = ()

    @classmethod
    def failed(cls, failure: EpisodeFailed, record: SessionRecord | None = None) -> Ended:
        trace = Tracebacks().told(failure.__cause__).strip()
        return cls(cause=failure.cause, error=failure.error, trace=trace, record=record)


class Stage:
    """Plays tasks one by one, as many at once as are asked for."""

    def __init__(self, episodes: Episodes, player: _Listening, ends: _Ends, errors: UserErrors) -> None:
        self._episodes = episodes
        self._player = player
        self._ends = ends
        self._errors = errors

    async def play(self, task: Task) -> Ended:
        lease = TaskLease(task=task, attempt=uuid.uuid4().hex, seconds=0.0)
        try:
            await self._episodes.play(lease)
            answer = self._player.answers.get(lease.attempt)
            ended = self._ends.ended[lease.attempt]
            return replace(ended, answer=answer, errors=self._errors.take())
        finally:
            self._player.answers.pop(lease.attempt, None)
            self._ends.ended.pop(lease.attempt, None)


@asynccontextmanager
async def open_engines(recipe: Recipe, logs: Path) -> AsyncIterator[NodeEngines]:
    """One engine for each policy, with the weights of the policy's model; servers write to `logs`."""
    exact = recipe.runtime.deterministic
    engines = {
        name: build_engine(policy, exact=exact, logs=logs, adapters=False) for name, policy in recipe.policies.items()
    }
    opened = NodeEngines(recipe, name=NAME, token=token_urlsafe(32), host=EngineHost(NAME, engines))
    try:
        await opened.start()
        running = asyncio.create_task(opened.run(), name="engines")
        try:
            yield opened
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    finally:
        await opened.close()


@asynccontextmanager
async def open_stage(
    recipe: Recipe, engines: NodeEngines, folder: Path, *, watched: SessionLog | None = None
) -> AsyncIterator[Stage]:
    """Commands get their folders below `folder`; `watched` is called with every model call as it ends."""
    refuse_outside(recipe)
    clock, ends, feed = SystemClock(), _Ends(), Feed()
    late = LateRewards(clock)
    async with open_cast(recipe, feed, folder) as cast:
        player = _Listening(cast.player)
        # Sessions live in memory: an evaluation that dies plays its unfinished samples again.
        gateway = build_gateway(recipe, token_urlsafe(32), engines, sessions=watched)
        Control(gateway, feed, late.given, recipe.reward_givers)
        try:
            await cast.prepare()
            episodes = cast._replace(player=player).episodes(gateway, ends, late, clock)
            episodes.gateway_url = await gateway.start()
            yield Stage(episodes, player, ends, cast.surroundings.errors)
        finally:
            await gateway.stop()


class _Ends:
    """Keeps how episodes ended until their player has looked."""

    def __init__(self) -> None:
        self.ended: dict[str, Ended] = {}

    async def complete(
        self,
        lease: TaskLease,
        record: SessionRecord,
        rewards: Mapping[str, float],
        seconds: float,
        metrics: Mapping[str, float],
        *,
        end: str = "",
        answer: bytes | None = None,
    ) -> Ack:
        self.ended[lease.attempt] = Ended(record=record, rewards=rewards, metrics=metrics, seconds=seconds)
        return Ack(accepted=True)

    async def fail(self, lease: TaskLease, failure: EpisodeFailed, record: SessionRecord | None) -> Ack:
        self.ended[lease.attempt] = Ended.failed(failure, record)
        return Ack(accepted=False, reason=str(failure))


class _Listening:
    """A player whose answers are kept until they are read."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.answers: dict[str, Any] = {}

    def wanted(self) -> int | None:
        return self._player.wanted()

    async def play(self, attempt: str, open_session: Open) -> Played:
        played = await self._player.play(attempt, open_session)
        self.answers[attempt] = played.answer
        return played

    def over(self, attempt: str, *, accepted: bool, reason: str) -> None:
        self._player.over(attempt, accepted=accepted, reason=reason)

    def close(self) -> None:
        """The player is its cast's to close."""


_SLOTS = 8  # sequences at once are enough for one episode, and quickly made room for


@dataclass(frozen=True)
class Turn:
    """One answered model call. `given` are the messages that no earlier call had.

    `fork` says why the call left every earlier path, empty where it continues one; `begins`: it shares no message with
    an earlier call. `prompt` and `sampled` count tokens, None where unknown; `tokens` and `logprobs` are of the
    answer, empty where an endpoint has sampled it.
    """

    policy: str
    agent: str
    given: Sequence[Body]
    answer: Body
    finish: str
    begins: bool = False
    fork: str = ""
    prompt: int | None = None
    sampled: int | None = None
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


Tell = Callable[[Turn], None]


@dataclass(frozen=True)
class Outcome:
    """What the episode came to. `paths` are as those of `SessionRecord.transcript`, `forks` the reasons of all forks;
    an endpoint leaves no `samples`."""

    ended: Ended
    calls: int
    paths: Sequence[dict[str, Any]]
    forks: Sequence[str]
    samples: Sequence[Sample] = field(default=())


def for_one_episode(recipe: Recipe) -> Recipe:
    """Return the recipe without what concerns a whole run, which may not fit one process."""
    policies = {
        name: policy.model_copy(
            update={"engine": policy.engine.model_copy(update={"slots": min(policy.engine.slots, _SLOTS)})}
        )
        for name, policy in recipe.policies.items()
    }
    runtime = RuntimeConfig(deterministic=recipe.runtime.deterministic)
    return recipe.model_copy(update={"policies": policies, "runtime": runtime, "resources": ResourcesConfig()})


async def try_policy(recipe: Recipe, task: Task, folder: Path, tell: Tell) -> Outcome:
    """Play one episode with the recipe's own models; `folder` is where commands and servers write."""
    recipe = for_one_episode(recipe)
    watcher = Watcher(tell)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    async with (
        open_engines(recipe, logs) as engines,
        open_stage(recipe, engines, folder, watched=watcher) as stage,
    ):
        ended = await stage.play(task)
    return watcher.outcome(ended)


class Watcher(NoSessionLog):
    """Tells every answer of a session as it ends, and keeps the session to look at."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._session: Session | None = None
        self._seen: set[Node] = set()

    def opened(self, session: Session) -> None:
        self._session = session

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        path, tree = node.path(), session.trees[asked.policy]
        new = [one for one in path if one not in self._seen]
        self._tell(
            Turn(
                policy=asked.policy,
                agent=node.agent,
                given=[message.body for one in new[:-1] for message in one.messages],
                answer=node.messages[-1].body,
                finish=node.finish or "",
                begins=len(new) == len(path),
                fork=next((cause(tree, one) for one in new if one.fork), ""),
                prompt=sum(len(one.tokens) for one in path[:-1]),
                sampled=len(node.tokens),
                tokens=list(node.tokens),
                logprobs=list(node.logprobs),
            )
        )
        self._seen.update(new)

    def outcome(self, ended: Ended) -> Outcome:
        """Return the whole episode; of a failed one, its messages before the failure."""
        if self._session is None:
            return Outcome(ended, 0, [], [])
        record = self._session.record()
        reasons = [cause(tree, fork) for tree in record.trees.values() for fork in forks(tree)]
        samples = [sample for policy in record.trees for sample in record.samples(policy)]
        return Outcome(ended, record.calls, record.transcript(), reasons, samples)
