"""Completions: episodes that ended well, many at a time, each taken or refused as if it had come alone.

The same news twice is taken once; other news under an attempt that was completed is refused. What is refused has
changed nothing of the task. Those that are taken are written together: a statement for each table, not for each of
them. Whatever ends otherwise is written after those before it, so the order in which they came is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.dataflow.tables import NEWEST
from rillflow.dataflow.tasks import Tasks
from rillflow.dataflow.user_errors import UserErrors
from rillflow.errors import BadRequest, LeaseLost, RillflowError
from rillflow.types import Ack, CompleteTask, SampleMeta

# A completion that counts as a failure of the episode: there is nothing in it to train on, or no reward.
NO_MODEL_CALL, BAD_REWARD = "no_model_call", "bad_reward"
PAYLOAD_GONE = "payload_gone"
ENDED = "ended."  # begins the counters of episodes that have a reward though they ended without an answer
NOTES = "notes"  # what people are told of how agents play: the first text of each subject
_MOST_NOTES, _LONGEST_NOTE = 16, 2000
_MOST_TOKENS = 1 << 31  # of one sample: sums over a group stay within 64 bits
_LONGEST_AGENT = 100
LARGEST_REWARD = 3.4e38  # a trainer's numbers have 32 bits; statistics of larger ones are no numbers
_ATTEMPTS = (
    "SELECT t.id, t.grp, t.lane, t.place, t.attempt, t.node, t.failures, t.returns, a.id AS asked, "
    "a.state AS held, a.cause AS why, a.node AS holder, a.digest "
    "FROM json_each(?) j JOIN attempts a ON a.id = j.value JOIN tasks t ON t.id = a.task"
)
_VERSIONS = (
    "INSERT INTO group_versions VALUES (?, ?, ?, ?) ON CONFLICT (grp, producer) DO UPDATE SET "
    "oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest)"
)


@dataclass(frozen=True)
class _Line:
    """What decides whether versions may be trained. No completion changes it."""

    heads: dict[str, int]
    deaths: bool  # whether any version has died
    on_policy: frozenset[str]  # policies of which an unfinished stream takes the newest version only


@dataclass(frozen=True)
class _Good:
    """A completion that is taken, unless its rows are gone; `live` are the samples that anybody may ask for."""

    row: sqlite3.Row
    news: CompleteTask
    digest: str
    live: list[bool]


_Judged = _Good | RillflowError | Callable[[], Ack]


class Completions(Part):
    def __init__(
        self,
        base: Base,
        *,
        tasks: Tasks,
        groups: Groups,
        lineage: Lineage,
        nodes: Nodes,
        rows: Rows,
        errors: UserErrors,
    ) -> None:
        super().__init__(base)
        self._errors = errors
        self._tasks = tasks
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes
        self._rows = rows

    def take(self, news: Sequence[CompleteTask]) -> list[Ack | RillflowError]:
        """An answer to each, in the same order."""
        return [answer for part in _without_repeats(news) for answer in self._take(part)]

    def _take(self, news: Sequence[CompleteTask]) -> list[Ack | RillflowError]:
        found, line = self._attempts(news), self._line()
        answers: list[Ack | RillflowError] = []
        good: dict[int, _Good] = {}  # by their place among the answers
        for one in news:
            judged = self._judge(one, found.get(one.attempt), line)
            if isinstance(judged, _Good):
                good[len(answers)] = judged
                answers.append(Ack(accepted=True))
            elif isinstance(judged, RillflowError):
                answers.append(judged)
            else:
                self._write(good, answers)
                good = {}
                answers.append(judged())
        self._write(good, answers)
        return answers

    def _attempts(self, news: Sequence[CompleteTask]) -> dict[str, sqlite3.Row]:
        asked = json.dumps([one.attempt for one in news])
        return {row["asked"]: row for row in self._db.all(_ATTEMPTS, (asked,))}

    def _line(self) -> _Line:
        unfinished = self._lineage.unfinished()
        on_policy = {
            producer
            for stream in unfinished
            if self._rules.policies[stream].on_policy
            for producer in self._rules.policies[stream].producers
        }
        return _Line(self._lineage.heads, self._lineage.deaths, frozenset(on_policy))

    # ------------------------------------------------------------ judging

    def _judge(self, news: CompleteTask, row: sqlite3.Row | None, line: _Line) -> _Judged:
        """Changes nothing."""
        if row is not None and row["id"] != news.task:
            row = None
        try:
            self._check(news)
            digest = _digest(news)
        except BadRequest as error:
            return error
        if row is not None and (row["held"] == "done" or row["why"] in (NO_MODEL_CALL, BAD_REWARD)):
            return partial(Ack, accepted=True, reason=row["why"]) if row["digest"] == digest else _told_twice(news)
        if row is None or row["held"] != "held":
            return partial(self._tasks.refuse, row, news.samples)
        if cause := self._why_again(row, news.samples, line):
            return partial(self._play_again, row, cause, news)
        if cause := _why_failed(row["lane"], news):
            return partial(self._fail, row, cause, news, digest)
        return _Good(row, news, digest, [self._wanted(row["lane"], sample) for sample in news.samples])

    def _check(self, news: CompleteTask) -> None:
        """Refuse what cannot be written down before anything is: others' completions share the transition."""
        whole = 0 <= news.calls <= NEWEST
        for sample in news.samples:
            row = sample.row
            whole = whole and 0 <= row.segment <= NEWEST and 0 <= row.offset <= NEWEST and 0 <= row.length <= NEWEST
        if not whole:
            raise BadRequest(f"a number of {news.task!r:.80} is out of range", "64 bits, signed, are the limit")
        if not all(map(math.isfinite, (news.seconds, *news.metrics.values()))):
            raise BadRequest(f"a number of {news.task!r:.80} is not finite", "check the node's clock and its metrics")
        for sample in news.samples:
            self._lineage.check_policy(sample.policy)
            whole = 0 <= sample.trained <= sample.tokens <= _MOST_TOKENS and (
                sample.trained == 0 or 0 <= sample.oldest <= sample.newest <= NEWEST
            )
            whole = whole and len(sample.agent) <= _LONGEST_AGENT and 0 <= sample.turn <= NEWEST
            if not whole or not math.isfinite(sample.reward):
                raise BadRequest(f"a sample of {news.task!r:.80} contradicts itself: {sample}", "check the node")

    def _why_again(self, row: sqlite3.Row, samples: list[SampleMeta], line: _Line) -> str:
        """Why an episode that ended well must be played again, if so: its versions are dead, or not on-policy."""
        trained = [sample for sample in samples if sample.trained]
        if line.deaths and any(self._lineage.died(s.policy, s.oldest, s.newest) for s in trained):
            return "rolled_back"
        late = [s for s in trained if s.policy in line.on_policy and s.oldest < line.heads[s.policy]]
        return "stale" if late and row["lane"] == "train" else ""

    def _wanted(self, lane: str, sample: SampleMeta) -> bool:
        """Whether anybody may ask for the sample: a stream, or whoever looks at an evaluation."""
        return lane == "eval" or (sample.trained > 0 and bool(self._rules.streams_of(sample.policy)))

    # ------------------------------------------------------------ ends of other kinds

    def _play_again(self, row: sqlite3.Row, cause: str, news: CompleteTask) -> Ack:
        self._rows.note(sample.row for sample in news.samples)
        self._tasks.give_back(row, cause, samples=len(news.samples))
        self._db.count(f"rerun.{cause}")
        return Ack(accepted=False, reason=f"{cause}: the task is played again")

    def _fail(self, row: sqlite3.Row, cause: str, news: CompleteTask, digest: str) -> Ack:
        self._rows.note(sample.row for sample in news.samples)
        error = f"reward {news.reward}, {news.calls} model calls"
        self._tasks.end_badly(row, cause, error, samples=len(news.samples), digest=digest)
        return Ack(accepted=True, reason=cause)

    # ------------------------------------------------------------ writing

    def _write(self, good: dict[int, _Good], answers: list[Ack | RillflowError]) -> None:
        """Where a row is gone, each is written on its own: only those whose rows are there are taken."""
        if not good:
            return
        ends = list(good.values())
        if self._rows.take(s.row for one in ends for s, live in zip(one.news.samples, one.live, strict=True) if live):
            self._done(ends)
        elif len(good) > 1:
            for n, one in good.items():
                self._write({n: one}, answers)
        else:
            ((n, one),) = good.items()
            self._tasks.lose(one.row, PAYLOAD_GONE)  # a node that writes to nowhere must not do so for ever
            answers[n] = Ack(accepted=False, reason=f"{PAYLOAD_GONE}: the task is played again")

    def _done(self, ends: Sequence[_Good]) -> None:
        for one in ends:
            if not all(one.live):
                self._rows.note(sample.row for sample in one.news.samples)
        now = self._clock.now()
        self._errors.add([error for one in ends for error in one.news.errors])
        self._db.many(
            "UPDATE attempts SET state = 'done', cause = '', digest = ?, ended_at = ? WHERE id = ?",
            [(one.digest, now, one.news.attempt) for one in ends],
        )
        self._db.many(
            "UPDATE tasks SET state = 'done', cause = '', error = '', reward = ?, given = ?, samples = ?, calls = ?, "
            "seconds = ?, metrics = ? WHERE id = ?",
            [_task_values(one.news) for one in ends],
        )
        self._db.many(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [values for one in ends for values in _sample_values(one)],
        )
        self._db.many(_VERSIONS, _versions(ends))
        self._praise(ends)
        self._note(ends)
        for end, times in Counter(one.news.end[:100] for one in ends if one.news.end).items():
            self._db.count(f"{ENDED}{end}", times)
        if not self._rules.group_reward:  # else they have not succeeded yet
            self._db.clear_counter("failures_in_a_row")
        for group in reversed(dict.fromkeys(one.row["grp"] for one in reversed(ends))):  # as their last ones came
            self._groups.settle(group)

    def _note(self, ends: Sequence[_Good]) -> None:
        """Keep the first note of each subject, for everybody who looks at the run."""
        told = {subject[:100]: text[:_LONGEST_NOTE] for one in ends for subject, text in one.news.notes.items()}
        if told:
            notes = told | self._db.meta(NOTES, {})
            self._db.set_meta(NOTES, dict(list(notes.items())[-_MOST_NOTES:]))

    def _praise(self, ends: Sequence[_Good]) -> None:
        """The nodes that have played them."""
        played: dict[tuple[str, str], list[CompleteTask]] = {}
        for one in ends:
            played.setdefault((one.row["holder"], one.row["lane"]), []).append(one.news)
        for (node, lane), news in played.items():
            self._nodes.succeeded(node, lane, [(one.seconds, len(one.samples)) for one in news])


def _without_repeats(news: Sequence[CompleteTask]) -> Iterator[list[CompleteTask]]:
    """In parts, so that news of an attempt finds written what the same attempt has told before."""
    part: dict[str, CompleteTask] = {}
    for one in news:
        if one.attempt in part:
            yield list(part.values())
            part = {}
        part[one.attempt] = one
    if part:
        yield list(part.values())


def _told_twice(news: CompleteTask) -> LeaseLost:
    return LeaseLost(
        f"attempt {news.attempt!r:.80} was completed before, with another payload",
        "an attempt is completed once: check that no two processes play under one name",
    )


def _why_failed(lane: str, news: CompleteTask) -> str:
    trained = news.calls if lane == "eval" else sum([sample.trained for sample in news.samples])
    if trained == 0:
        return NO_MODEL_CALL
    rewards = [news.reward, *[sample.reward for sample in news.samples]]
    return "" if all([abs(reward) <= LARGEST_REWARD for reward in rewards]) else BAD_REWARD


def _digest(news: CompleteTask) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(news), digest_size=8).hexdigest()


def _task_values(news: CompleteTask) -> tuple[float | int | str, ...]:
    metrics = msgspec.json.encode(news.metrics).decode()
    return (news.reward, news.reward, len(news.samples), news.calls, news.seconds, metrics, news.task)


def _sample_values(one: _Good) -> Iterator[tuple[str | int | float, ...]]:
    group, place = one.row["grp"], one.row["place"]
    for n, (sample, live) in enumerate(zip(one.news.samples, one.live, strict=True)):
        at = sample.row
        yield (
            *(group, place, n, sample.policy, at.unit, at.segment, at.offset, at.length, sample.tokens, sample.trained),
            *(sample.oldest, sample.newest, sample.reward, int(sample.truncated), int(live), sample.agent, sample.turn),
        )


def _versions(ends: Sequence[_Good]) -> list[tuple[str, str, int, int]]:
    """The oldest and newest version of each group's trained tokens, by who has sampled them."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in ends:
        if one.row["lane"] == "train":
            for s in one.news.samples:
                if s.trained:
                    key = (one.row["grp"], s.policy)
                    oldest, newest = found.get(key, (s.oldest, s.newest))
                    found[key] = (min(oldest, s.oldest), max(newest, s.newest))
    return [(*key, *versions) for key, versions in found.items()]
