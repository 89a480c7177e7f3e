"""The life of an episode: its session opens, a player plays it, it is rewarded, and its end is sent to the run.

Invariants: the end of an episode is sent to the run exactly once, or not at all if its lease was lost or no agent took
it; no call is answered after it was played; its record stays in the session's log until the run has it. An episode that
was played and waits for its reward holds a session, but does not count as played.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
import openai

from rillflow.agents.rewards.base import Given
from rillflow.config.rollout import RolloutConfig
from rillflow.config.tracebacks import short
from rillflow.contracts import Clock
from rillflow.errors import RewardError, RillflowError, WorkflowError
from rillflow.gateway.feed import EndSession
from rillflow.gateway.server import Gateway, anthropic_url
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.record import SessionRecord
from rillflow.rollout.episode import MOST_METRICS, EpisodeFailed, Give, Reward, RunningEpisode, Surroundings, score
from rillflow.rollout.players import NotTaken, OutsidePlayer, Played, Player
from rillflow.rollout.push import Ends, check_record
from rillflow.rollout.rewards import LateRewards, RewardRules, rewards_given, role_rewards
from rillflow.types import Ack, EpisodeFacts, TaskLease, Wire

log = logging.getLogger(__name__)

# Metrics: rewards given that do not count, requests for other sampling than the recipe's, unparsed tool calls.
REWARDS_REFUSED, SAMPLING_OVERRULED, UNPARSED = "rewards_refused", "sampling_overruled", "unparsed_calls"
_LINGER = 600.0  # seconds that a session may be there after its deadline and its reward's


class Kept(Wire, frozen=True):
    """The facts of an episode in its session's log, for the node that follows if this one dies."""

    lease: TaskLease
    begun: float
    said: EndSession | None = None  # by an agent from outside, at its end
    rewarded_until: float | None = None  # it was played and waits for its reward


class Episodes:
    """All episodes of one node. `waiting` of them were played and wait for their reward.

    `on_room` is called when there is room for another; `stopping` leaves running episodes to the node that follows.
    A `resting` node has no room.
    """

    def __init__(
        self,
        limits: RolloutConfig,
        policies: Sequence[str],
        *,
        player: Player,
        reward: Reward | None,
        gateway: Gateway,
        client: openai.AsyncOpenAI,
        pusher: Ends,
        late: LateRewards,
        clock: Clock,
        surroundings: Surroundings | None = None,
        rules: RewardRules | None = None,
    ) -> None:
        self.stopping = False
        self.resting = False
        self.waiting = 0
        self.finished = 0
        self.gateway_url = ""  # known once the gateway listens, before the first task is leased
        self.on_room: Callable[[], None] = lambda: None
        self._limits = limits
        self._policies = policies
        self._player = player
        self._reward = reward
        self._gateway = gateway
        self._sessions = gateway.sessions
        self._client = client
        self._pusher = pusher
        self._late = late
        self._clock = clock
        self._surroundings = surroundings
        self._rules = rules or RewardRules()

    def room(self, under_way: int) -> int:
        """Return how many tasks to ask for, given the number under way."""
        if self.resting:
            return 0
        played = under_way - self.waiting
        free = min(self._limits.episodes - played, self._gateway.limits.sessions - under_way)
        wanted = self._player.wanted()
        return free if wanted is None else min(free, wanted)

    # ------------------------------------------------------------ beginnings

    async def play(self, lease: TaskLease) -> bool:
        """Play one task to its end; return whether the run accepted it as a completed episode for training."""
        kept = Kept(lease=lease, begun=self._clock.now())
        return await self._life(kept, self._player.play(lease.attempt, lambda: self._open(kept)))

    def going_on(self, restored: Sequence[Session]) -> list[Session]:
        """Return the sessions of the node before this one that go on; the agents of the others died with it.

        Called before the gateway listens: agents from outside may end theirs as soon as it does.
        """
        going_on = {session.id: session for session in restored if self._goes_on(session)}
        for session in restored:
            if session.id not in going_on:
                self._sessions.close(session.id)
        return list(going_on.values())

    def _goes_on(self, session: Session) -> bool:
        try:
            kept = msgspec.convert(session.detail, Kept)
        except msgspec.ValidationError:
            return False
        if isinstance(self._player, OutsidePlayer):
            self._player.expect(session.id, kept.said if kept.rewarded_until is None else EndSession())
            return True
        return kept.rewarded_until is not None

    async def go_on(self, session: Session) -> bool:
        """Play a session of the node before this one to its end."""
        kept = msgspec.convert(session.detail, Kept)
        if isinstance(self._player, OutsidePlayer):
            seconds = session.deadline - self._clock.monotonic()
            return await self._life(kept, self._player.go_on(session.id, seconds))
        return await self._life(kept, _played(Played(None)))

    def _open(self, kept: Kept) -> RunningEpisode:
        task, attempt = kept.lease.task, kept.lease.attempt
        key = self._sessions.open(
            attempt,
            seed=task.seed,
            group=task.group,
            deadline_seconds=self._limits.episode_timeout,
            detail=msgspec.to_builtins(kept),
            linger=self._limits.late_rewards + _LINGER,
        )
        return RunningEpisode(
            task,
            client=self._client,
            policies=self._policies,
            url=anthropic_url(self.gateway_url, attempt),
            api_key=key,
            clock=self._clock,
            seconds=self._limits.episode_timeout,
            give=self._giving(self._sessions.get(attempt)),
            surroundings=self._surroundings,
            chat=partial(self._gateway.chat, attempt),
        )

    # ------------------------------------------------------------ endings

    async def _life(self, kept: Kept, playing: Awaitable[Played]) -> bool:
        """Play an episode and send its end to the run, whatever happens in between."""
        lease, ack = kept.lease, Ack(accepted=False, reason="the run wants this episode no more")
        try:
            ack = await self._ended(kept, playing)
        except NotTaken:
            log.info("task %s: nobody took it; it goes back", lease.task.id)
        except RillflowError as error:
            # This refusal is final. The lease expires and the task is played again, here or elsewhere.
            log.warning("task %s: its end was refused: %s", lease.task.id, error)
            ack = Ack(accepted=False, reason=error.message)
        finally:
            if not self.stopping:
                self._forget(lease.attempt)
                self._player.over(lease.attempt, accepted=ack.accepted, reason=ack.reason)
        self.finished += ack.accepted
        return ack.accepted and lease.task.lane == "train"

    async def _ended(self, kept: Kept, playing: Awaitable[Played]) -> Ack:
        lease = kept.lease
        record: SessionRecord | None = None
        try:
            played, rewards = await self._outcome(lease.attempt, playing)
            metrics = dict(played.metrics)
            if rewards is None:
                rewards = await self._rewards(kept, played, metrics)
            seconds = self._clock.now() - kept.begun
            session = self._sessions.get(lease.attempt)
            counted = {
                REWARDS_REFUSED: session.rewards_refused,
                SAMPLING_OVERRULED: session.sampling_overruled,
                UNPARSED: session.unparsed_calls,
            }
            metrics |= {name: float(count) for name, count in counted.items() if count}
            record = self._sessions.close(lease.attempt, keep=True)
            trained = lease.task.lane != "eval"
            check_record(record, rewards, answer_is_reward=self._reward is None, rules=self._rules if trained else None)
            answer = _as_json(played.answer) if self._rules.grouped else None
            roles = {} if self._rules.grouped else role_rewards(record, rewards, played.roles)
            for name, value in roles.items():
                if len(metrics) < MOST_METRICS:
                    metrics[name] = value
        except EpisodeFailed as failure:
            with suppress(CallRefused):  # closed above, or never opened
                record = self._sessions.close(lease.attempt, keep=True)
            return await self._pusher.fail(lease, failure, record)
        return await self._pusher.complete(lease, record, rewards, seconds, metrics, end=played.end, answer=answer)

    async def _outcome(self, attempt: str, playing: Awaitable[Played]) -> tuple[Played, Mapping[str, float] | None]:
        """Return how the episode was played, with its rewards where the recipe says what its end is worth. The session
        has ended then."""
        try:
            played = await playing
        except EpisodeFailed as failure:
            with suppress(CallRefused):  # never opened, or closed
                self._sessions.end(attempt)
                if (end := self._rewarded(self._sessions.get(attempt), failure)) is not None:
                    name, reward = end
                    log.info("%s ended without an answer, which is worth %g: %s", attempt, reward, failure)
                    return Played(None, end=name), dict.fromkeys(self._policies, reward)
            raise
        self._sessions.end(attempt)
        return played, None

    def _rewarded(self, session: Session, failure: EpisodeFailed) -> tuple[str, float] | None:
        """Return the name of this failure in the recipe's `ends`, with its reward. The policy did not cause the failure
        of an episode in which nothing was sampled, or in which a call failed without a fault of the agent."""
        sampled = any(tree.leaves() for tree in session.trees.values())
        return self._rules.end(failure.cause, failure.detail) if sampled and not session.faults else None

    def _forget(self, attempt: str) -> None:
        try:
            self._sessions.close(attempt)
        except CallRefused:  # closed before, or never opened
            self._sessions.forget(attempt)

    async def _rewards(self, kept: Kept, played: Played, metrics: dict[str, float]) -> Mapping[str, float]:
        """Return the reward of each policy: of the recipe's function, of the player, or given over HTTP."""
        limit, session = self._limits.reward_timeout, self._sessions.get(kept.lease.attempt)
        payload = kept.lease.task.prompt.payload
        if self._reward is not None:
            given = self._given(kept, session, payload, played)
            return await score(self._reward, given, limit, self._policies, metrics=metrics)
        if played.reward is not None:
            if session.rewards.of_session:
                raise EpisodeFailed(
                    "reward_error", "the session was given a reward, and another was returned: give one of them"
                )
            return await score(None, Given(payload, played.reward), limit, self._policies, metrics=metrics)
        if session.calls and not _is_rewarded(session) and self._limits.late_rewards:
            await self._await_reward(kept, session)
        try:
            found = rewards_given(session.rewards.settle(), session.trees, self._rules)
        except RewardError as error:
            raise EpisodeFailed("reward_error", short(error)) from error
        rewards = {policy: found[policy] for policy in self._policies if policy in found}
        if session.calls and not rewards:
            raise EpisodeFailed("reward_error", "no reward in time: none was returned or given to the session")
        return rewards

    def _given(self, kept: Kept, session: Session, payload: dict[str, Any], played: Played) -> Given:
        task = kept.lease.task
        facts = EpisodeFacts(
            task=task.id,
            prompt=task.prompt.id,
            policies=list(self._policies),
            seed=task.seed,
            evaluating=task.lane == "eval",
            seconds=self._clock.now() - kept.begun,
        )
        read = partial(_messages, session)
        return Given(payload, played.answer, read=read, metrics=played.metrics, episode=facts)

    def _giving(self, session: Session) -> Give:
        """Return the function that gives rewards from this process. They are on disk before the session ends."""

        def give(value: float, *, call: str | None, turn: int | None, leaf: int | None, policy: str | None) -> None:
            if self._reward is not None and call is None and turn is None and leaf is None:
                raise WorkflowError(
                    "the recipe's `reward` decides what the whole episode is worth: this reward would not count",
                    "reward single answers (call=…), or leave `reward` out of the recipe",
                )
            if self._rules.grouped:
                raise WorkflowError(
                    "the recipe's `reward` compares whole episodes of a group: one of a single answer would not count",
                    "reward episodes alone, or take the reward that names `group` out of the recipe",
                )
            session.rewards.give(value, call=call, turn=turn, leaf=leaf, policy=policy)
            session.log.rewarded(session)

        return give

    async def _await_reward(self, kept: Kept, session: Session) -> None:
        """Wait for the reward of an episode that was played; its agent is free for another one."""
        until = kept.rewarded_until or self._clock.now() + self._limits.late_rewards
        seconds = max(0.0, until - self._clock.now())
        waits = msgspec.structs.replace(kept, rewarded_until=until)
        self._sessions.note(session.id, msgspec.to_builtins(waits))
        await self._sessions.log.synced()
        self._player.over(session.id, accepted=True, reason=f"its reward is awaited for {seconds:.0f} s")
        self.waiting += 1
        self.on_room()
        try:
            await self._late.wait(session.id, lambda: _is_rewarded(session), self._clock.monotonic() + seconds)
        finally:
            self.waiting -= 1


def _is_rewarded(session: Session) -> bool:
    """Return whether every policy of the session has a reward of the whole session."""
    return session.trees.keys() <= session.rewards.settle().session.keys()


def _messages(session: Session) -> list[dict[str, Any]]:
    """Return copies of all messages of a session, each once."""
    return deepcopy([message for path in session.record().transcript() for message in path["messages"]])


def _as_json(answer: Any) -> bytes:
    """Return an answer as a reward of the whole group is given it, in another process."""
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailed(
            "reward_error",
            f"the answer is a {type(answer).__name__} and cannot be written as JSON ({error}), so the group's reward "
            "cannot be given it: return text, numbers, lists or mappings",
        ) from error


async def _played(played: Played) -> Played:
    return played
