"""What an episode left, as a trajectory for people to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rillflow.config.tracebacks import trace_of
from rillflow.contracts import Clock
from rillflow.gateway.trees.record import Sample, SessionRecord
from rillflow.rollout.episode import EpisodeFailed
from rillflow.storage.trajectories import TokenPath, Trajectory, TrajectoryInfo, described, encode_body

MOST_SENT = 1 << 20  # bytes of a failed episode that a node sends
BURST, PAUSE = 16, 5.0  # failed episodes that a node sends at once; then one in so many seconds
_LONGEST_ERROR = 20_000


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
