"""Attempts: every lease of a task that was ever given, and what follows from its completion.

The row of a task says which attempt holds it or has done it. An attempt that ends otherwise gets a row of its own,
before the row of its task goes on without it. The view `attempts` has all of them. The only writer of ended_attempts.

`Judge` decides about a completion and writes nothing. The same completion twice is taken once; another one under the
same attempt is refused. An episode that ended well is played again when its tokens cannot be trained: their versions
died, or the run is on-policy and they are not of the newest. One without a call of the model, or without a finite
reward, is a failure of the episode.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.tables import NEWEST, TASK, Attempt, Task
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.dataflow.rules import Rules
from rillflow.errors import BadRequest, LeaseLost, RillflowError
from rillflow.types import CompleteTask, SampleMeta

_LONGEST_PLACE = 9  # digits of a task's place in its group
_TASK = f"SELECT {TASK}, t.digest FROM tasks t JOIN groups g ON g.id = t.grp WHERE t.grp = ? AND t.place = ?"


class Attempts(Part):
    def __init__(self, base: Base, playing: Playing) -> None:
        super().__init__(base)
        self._playing = playing

    def find(self, name: str) -> Attempt | None:
        """Return the attempt, whether or not it holds its task; None for an unknown attempt."""
        held = self._playing.held(name)
        if held is not None:
            return Attempt(name, held, held.node or "")
        group, _, place = name.rpartition("-")[0].rpartition(".")
        if not place.isdecimal() or len(place) > _LONGEST_PLACE:
            return None
        row = self._db.one(_TASK, (group, int(place)))
        if row is None:
            return None
        task = Task(*row[:-1])
        if task.state == "done" and task.attempt == name:
            return Attempt(name, task, task.node or "", "done", digest=row[-1])
        ended = self._db.one("SELECT node, state, cause, digest FROM ended_attempts WHERE id = ?", (name,))
        return None if ended is None else Attempt(name, task, *ended)

    def end(self, task: Task, state: str, cause: str, digest: str | None = None) -> None:
        """Record the end of the attempt that holds a task; `digest` identifies the completion that ended it."""
        self._db.run(
            "INSERT INTO ended_attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(task.attempt, task.grp, task.place, task.node, state, cause, digest, task.leased_at),
                self._clock.now(),
            ),
        )

    def end_done(self, group: str, place: int, state: str, cause: str, at: float | None = None) -> bool:
        """Record that the attempt which has done a task is void, at this time or when it was done; return False if the
        task is not done."""
        return bool(
            self._db.run(
                "INSERT INTO ended_attempts SELECT attempt, grp, place, node, ?, ?, digest, leased_at, "
                "ifnull(?, ended_at) FROM tasks WHERE grp = ? AND place = ? AND state = 'done'",
                (state, cause, at, group, place),
            )
        )


# ---------------------------------------------------------------- completions

NO_MODEL_CALL, BAD_REWARD = "no_model_call", "bad_reward"  # causes of a completion that is a failure
LARGEST_REWARD = 3.4e38  # a trainer's numbers have 32 bits; statistics of larger ones overflow
_MOST_TOKENS = 1 << 31  # of one sample: sums over a group stay within 64 bits
_LONGEST_AGENT = 100
_ENCODER = msgspec.msgpack.Encoder()

Kind = Literal["done", "repeated", "late", "again", "failed", "refused"]


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What follows from a completion of the attempt `held`.

    `done` and `failed` end the attempt; `again` returns it for `cause`. `repeated` was taken before, `late` comes from
    an attempt that does not hold its task. `refused` cannot be written down, or contradicts what was taken. `live` are
    the samples that anybody may ask for.
    """

    kind: Kind
    news: CompleteTask
    held: Attempt | None = None
    digest: str = ""
    cause: str = ""
    live: list[bool] = []
    error: RillflowError | None = None


class Judge:
    """Judges completions by where the policies stand. No completion changes that."""

    def __init__(self, rules: Rules, lineage: Lineage) -> None:
        self._lineage = lineage
        self._policies = rules.policies
        self._wanted = {name for name in rules.policies if rules.streams_of(name)}
        self._heads = lineage.heads
        strict = [rules.policies[stream] for stream in lineage.unfinished() if rules.policies[stream].on_policy]
        self._on_policy = {producer for policy in strict for producer in policy.producers}

    def judge(self, news: CompleteTask, held: Attempt | None, deaths: bool) -> Verdict:
        """`held` is the attempt that the completion names, if there is one; `deaths`, whether any version has died."""
        if held is not None and held.task.id != news.task:
            held = None
        if error := self._why_refused(news):
            return Verdict("refused", news, error=error)
        digest = hashlib.blake2b(_ENCODER.encode(news), digest_size=8).hexdigest()
        if held is not None and (held.state == "done" or held.cause in (NO_MODEL_CALL, BAD_REWARD)):
            same = held.digest == digest
            kind: Kind = "repeated" if same else "refused"
            return Verdict(kind, news, held, cause=held.cause, error=None if same else _completed_before(news))
        if held is None or held.state != "held":
            return Verdict("late", news, held)
        if cause := self._why_again(held, news.samples, deaths):
            return Verdict("again", news, held, cause=cause)
        if cause := _why_failed(held.task.lane, news):
            return Verdict("failed", news, held, digest, cause)
        evaluation = held.task.lane == "eval"
        live = [evaluation or (sample.trained > 0 and sample.policy in self._wanted) for sample in news.samples]
        return Verdict("done", news, held, digest, live=live)

    def _why_refused(self, news: CompleteTask) -> BadRequest | None:
        """Find what cannot be written down before anything is: others' completions share the transition."""
        whole = 0 <= news.calls <= NEWEST
        for sample in news.samples:
            row = sample.row
            whole = whole and 0 <= row.segment <= NEWEST and 0 <= row.offset <= NEWEST and 0 <= row.length <= NEWEST
        if not whole:
            return BadRequest(f"a number of {news.task!r:.80} is out of range", "64 bits, signed, are the limit")
        if not (math.isfinite(news.seconds) and all(map(math.isfinite, news.metrics.values()))):
            return BadRequest(f"a number of {news.task!r:.80} is not finite", "check the node's clock and its metrics")
        for sample in news.samples:
            if sample.policy not in self._policies:
                return self._lineage.unknown_policy(sample.policy)
            if not (
                0 <= sample.trained <= sample.tokens <= _MOST_TOKENS
                and (sample.trained == 0 or 0 <= sample.oldest <= sample.newest <= NEWEST)
                and len(sample.agent) <= _LONGEST_AGENT
                and 0 <= sample.turn <= NEWEST
                and math.isfinite(sample.reward)
            ):
                return BadRequest(f"a sample of {news.task!r:.80} contradicts itself: {sample}", "check the node")
        return None

    def _why_again(self, held: Attempt, samples: Sequence[SampleMeta], deaths: bool) -> str:
        """Return why an episode that ended well must be played again."""
        if deaths and any(s.trained and self._lineage.died(s.policy, s.oldest, s.newest) for s in samples):
            return "rolled_back"
        if held.task.lane == "eval" or not self._on_policy:
            return ""
        late = any(s.trained and s.policy in self._on_policy and s.oldest < self._heads[s.policy] for s in samples)
        return "stale" if late else ""


def _why_failed(lane: str, news: CompleteTask) -> str:
    """Return why a completion is a failure: nothing in it can be trained on, or it has no reward."""
    trained, fits = news.calls if lane == "eval" else 0, abs(news.reward) <= LARGEST_REWARD
    for sample in news.samples:
        trained += sample.trained if lane == "train" else 0
        fits = fits and abs(sample.reward) <= LARGEST_REWARD
    if trained == 0:
        return NO_MODEL_CALL
    return "" if fits else BAD_REWARD


def _completed_before(news: CompleteTask) -> LeaseLost:
    return LeaseLost(
        f"attempt {news.attempt!r:.80} was completed before, with another payload",
        "an attempt is completed once: check that no two processes play under one name",
    )


def without_repeats(news: Sequence[CompleteTask]) -> Iterator[list[CompleteTask]]:
    """Split the news so that a second one of the same attempt finds the first one written."""
    part: dict[str, CompleteTask] = {}
    for one in news:
        if one.attempt in part:
            yield list(part.values())
            part = {}
        part[one.attempt] = one
    if part:
        yield list(part.values())
