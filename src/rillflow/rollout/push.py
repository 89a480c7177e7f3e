"""How the end of an episode reaches the run: its payload goes to a storage unit first, then its end to the ledger. And
its trajectory in the form that is kept for people.

Invariants: a trajectory is durable before its task is completed; a record with holes is never trained on; the end of
an episode is sent again until the ledger has acknowledged or refused it, whatever its disk or the network does. An
episode whose lease is lost meanwhile is cancelled by its node, which ends the sending.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.config.tracebacks import UserErrors, short, trace_of
from rillflow.contracts import Clock
from rillflow.errors import DeadlineExceeded, LeaseLost, RillflowError, StorageError, Unavailable
from rillflow.gateway.trees.record import Sample, SessionRecord, cause, forks, forks_always
from rillflow.rollout.episode import EpisodeFailed
from rillflow.rollout.rewards import RewardRules, check_parts, require_all
from rillflow.storage.trajectory_format import TokenPath, Trajectory, TrajectoryInfo, described, encode_body
from rillflow.types import Ack, CompleteTask, FailTask, Row, SampleMeta, TaskLease
from rillflow.types.runs import ledger_of

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

log = logging.getLogger(__name__)

PUSH_DEADLINE = 120.0
FORKS, FORWARDED, TRAINED = "forks", "tokens_forwarded", "tokens_trained"  # metrics of an episode
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two tries to tell an end
_MAY_PASS = (Unavailable, DeadlineExceeded, StorageError)
MOST_SENT = 1 << 20  # bytes of a failed episode that a node sends
BURST, PAUSE = 16, 5.0  # failed episodes that a node sends at once; seconds between two later ones
_LONGEST_ERROR = 20_000


class Ends(Protocol):
    """Receives the ends of episodes: the run's ledger, or an evaluation."""

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
        """`answer` is its JSON, where a reward of the whole group will be given it."""

    async def fail(self, lease: TaskLease, failure: EpisodeFailed, record: SessionRecord | None) -> Ack:
        """`record` is what its session left, if it had one."""


class Pusher:
    """Sends the ends of one node's episodes to the run, with the errors of user code that `errors` has. Samples of
    `untrained` agents are not for trainers. `failures` decides how much of failed episodes is sent, for people;
    without it nothing is sent."""

    def __init__(
        self,
        node: str,
        dataflow: DataflowClient,
        writer: UnitWriter,
        untrained: Collection[str] = (),
        *,
        errors: UserErrors | None = None,
        failures: FailureSender | None = None,
    ) -> None:
        self._failures = failures
        self._node = node
        self._dataflow = dataflow
        self._writer = writer
        self._untrained = frozenset(untrained)
        self._errors = errors or UserErrors()
        self._told_forks = False

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
        """Push a trajectory whose policies have these `rewards`; a sample's own goes before its policy's. `end` is how
        the episode ended, if without an answer."""
        samples, payloads = pack(record, list(rewards), self._untrained, answer)
        rows = await self._writer.put(payloads, PUSH_DEADLINE, ledger=ledger_of(lease.attempt))
        done = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=self._node,
            reward=next(iter(rewards.values())),
            samples=[describe(sample, row, rewards[sample.policy]) for sample, row in zip(samples, rows, strict=True)],
            calls=record.calls,
            seconds=seconds,
            metrics={**metrics, **paths(record, samples)},
            notes=self._notes(record, samples),
            end=end,
            errors=self._errors.take(),
        )
        try:
            ack = await self._tell(lease, lambda: self._dataflow.complete(done, PUSH_DEADLINE))
        except LeaseLost as error:  # by the node before this one, which died before it could forget the session
            return Ack(accepted=True, reason=error.message)
        if not ack.accepted:
            log.info("task %s: completion not taken: %s", lease.task.id, ack.reason)
        return ack

    def _notes(self, record: SessionRecord, samples: Sequence[Sample]) -> dict[str, str]:
        """Say once why every call of an episode has left the path of those before it, to the run and in the log."""
        tree = next((tree for tree in record.trees.values() if forks_always(tree)), None)
        if self._told_forks or tree is None:
            return {}
        self._told_forks = True
        counted = paths(record, samples)
        note = (
            f"every call of an episode begins a new path: {cause(tree, forks(tree)[-1])}; {record.calls} calls made "
            f"{len(samples)} samples, which forward {counted[FORWARDED]:.0f} tokens to train {counted[TRAINED]:.0f}; "
            "trainer.trees computes what they share once (docs/gateway.md)"
        )
        log.warning("%s", note)
        return {"forks": note}

    async def fail(self, lease: TaskLease, failure: EpisodeFailed, record: SessionRecord | None) -> Ack:
        told = self._errors.note(failure.cause, failure.__cause__)
        log.warning("task %s failed: %s%s", lease.task.id, failure, told)
        news = FailTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=self._node,
            cause=failure.cause,
            error=failure.error,
            errors=self._errors.take(),
            trajectory=b"" if self._failures is None else self._failures.body(record, failure),
            calls=0 if record is None else record.calls,
        )
        await self._tell(lease, lambda: self._dataflow.fail(news, PUSH_DEADLINE))
        return Ack(accepted=False, reason=str(failure))

    async def _tell(self, lease: TaskLease, tell: Callable[[], Awaitable[Ack]]) -> Ack:
        """Send an end until the service answers. An error that cannot pass is raised."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await tell()
            except _MAY_PASS as error:
                log.warning("task %s: its end is told again in %.1f s: %s", lease.task.id, pause, error.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def check_record(
    record: SessionRecord, rewards: Mapping[str, float], *, answer_is_reward: bool, rules: RewardRules | None = None
) -> None:
    """Raise EpisodeFailed if a record cannot be trained on: no call, holes, a policy or a part without its reward, or
    rewards that break the recipe's `rules` (None: it is not trained on)."""
    if record.calls == 0:
        raise EpisodeFailed("no_model_call", "the agent called no model")
    if not record.trainable:
        raise EpisodeFailed("record_incomplete", record.incomplete)
    settled = record.settled()
    if settled.unknown:
        raise EpisodeFailed(
            "reward_error", f"rewards were given to what the session does not have: {settled.unknown[0]}"
        )
    sampled = {policy for policy, tree in record.trees.items() if tree.leaves()}
    try:
        require_all(rewards, sampled, answer_is_reward=answer_is_reward)
        if rules is not None:
            check_parts(settled, record.trees, rules)
    except RillflowError as error:
        raise EpisodeFailed("reward_error", short(error)) from error


def pack(
    record: SessionRecord, policies: Sequence[str], untrained: Collection[str] = (), answer: bytes | None = None
) -> tuple[list[Sample], list[dict[str, Buffer]]]:
    """Return the samples of a trajectory and, in the same order, their payload rows.

    What `untrained` agents said is left out; the transcript has it. An `answer` for the group's reward lies beside the
    transcript, with the first trained sample of each policy: rows that no trainer wants are not kept.
    """
    samples = [sample for policy in policies for sample in record.samples(policy) if sample.agent not in untrained]
    payloads: list[dict[str, Buffer]] = [dict(sample.columns) for sample in samples]
    if payloads:
        transcript = payloads[0]["transcript"] = json.dumps(record.transcript()).encode()
        if answer is not None:
            for n in _firsts(samples):
                payloads[n] |= {"transcript": transcript, "answer": answer}
    return samples, payloads


def paths(record: SessionRecord, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of an episode's paths: calls that left every earlier one, and the tokens of its samples."""
    return {
        FORKS: float(sum(len(forks(tree)) for tree in record.trees.values())),
        FORWARDED: float(sum(sample.tokens for sample in samples)),
        TRAINED: float(sum(sample.trained for sample in samples)),
    }


def _firsts(samples: Sequence[Sample]) -> list[int]:
    """Return the number of each policy's first sample that trains, or of its first where none does."""
    found: dict[str, int] = {}
    for n, sample in sorted(enumerate(samples), key=lambda one: one[1].trained == 0):
        found.setdefault(sample.policy, n)
    return list(found.values())


def describe(sample: Sample, row: Row, reward: float) -> SampleMeta:
    """Return the ledger's entry of a sample; its own reward wins over its policy's."""
    return SampleMeta(
        policy=sample.policy,
        row=row,
        tokens=sample.tokens,
        trained=sample.trained,
        oldest=sample.oldest,
        newest=sample.newest,
        reward=reward if sample.reward is None else sample.reward,
        truncated=sample.truncated,
        fork=sample.fork,
        seams=sample.seams,
        agent=sample.agent,
        turn=sample.turn,
    )


# ------------------------------------------------------------ trajectories for people


def trajectory_of(
    record: SessionRecord | None,
    *,
    payload: Mapping[str, Any],
    rewards: Mapping[str, float],
    metrics: Mapping[str, float],
    error: str = "",
    **known: Any,
) -> Trajectory:
    """Return the trajectory of an episode that left `record`; `rewards` are its policies', `known` are fields of its
    info that the record does not tell."""
    samples = [] if record is None else token_paths(record, rewards)
    return Trajectory(
        info=described(samples, calls=0 if record is None else record.calls, **known),
        payload=payload,
        paths=[] if record is None else record.transcript(),
        rewards=metrics,
        error=error,
        samples=samples,
    )


def token_paths(record: SessionRecord, rewards: Mapping[str, float]) -> list[TokenPath]:
    """Return the tokens of all paths, in the order of the transcript."""
    samples = [sample for policy in record.trees for sample in record.samples(policy)]
    return [_token_path(sample, number, rewards.get(sample.policy, 0.0)) for number, sample in enumerate(samples)]


def _token_path(sample: Sample, number: int, reward: float) -> TokenPath:
    columns = sample.columns
    return TokenPath(
        policy=sample.policy,
        role=sample.agent,
        reward=reward if sample.reward is None else sample.reward,
        fork=sample.fork,
        truncated=sample.truncated,
        path=number,
        tokens=columns["tokens"],
        mask=columns["mask"],
        logprobs=np.where(columns["temperatures"] > 0, columns["logprobs"], columns["raw_logprobs"]),
        versions=columns["versions"],
    )


def error_of(failure: EpisodeFailed) -> str:
    """Return what a failure said, with its traceback where user code raised."""
    trace = trace_of(failure.__cause__) if failure.__cause__ is not None else ""
    return "\n".join(filter(None, (failure.error, trace)))[-_LONGEST_ERROR:]


class FailureSender:
    """Decides which failed episodes a node sends, and how much of them: some at once, then one every few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = float(BURST)
        self._at = clock.monotonic()

    def body(self, record: SessionRecord | None, failure: EpisodeFailed) -> bytes:
        """Return what is sent of a failed episode; nothing where enough were sent of late. One that is too large goes
        without its tokens, or not at all."""
        now = self._clock.monotonic()
        self._left, self._at = min(self._left + (now - self._at) / PAUSE, BURST), now
        if self._left < 1:
            return b""
        self._left -= 1
        unnamed = TrajectoryInfo(id="", time=0.0, lane="train", status="failed", kept="failure")
        paths = [] if record is None else record.transcript()
        tokens = [] if record is None else token_paths(record, {})
        for samples in (tokens, []):
            body = encode_body(Trajectory(unnamed, paths=paths, error=error_of(failure), samples=samples))
            if len(body) <= MOST_SENT:
                return body
        return b""
