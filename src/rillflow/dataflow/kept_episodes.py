"""Which episodes a run keeps for people, and what the ledger knows of them.

A run keeps the best and the worst episode of each step, and some that are drawn. The draw depends on the run's seed and
the task alone, so the choice over a whole batch lies within the choices over its parts (`marked`): a trainer that gets
a batch in parts knows from each part for which episodes it may be asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.serving import ServedSample, batch_rows
from rillflow.dataflow.ledger.tables import Group, Sample
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.dataflow.rules import Rules, derive_seed
from rillflow.storage.trajectory_format import Kept
from rillflow.types import CommitBatch, FailTask, KeptTokens, Lane, Prompt, Row


@dataclass(frozen=True)
class KeptSample:
    """A sample of a kept episode, with the trainer's values."""

    policy: str
    row: Row
    reward: float
    truncated: bool
    agent: str
    told: KeptTokens | None


@dataclass(frozen=True)
class KeptEpisode:
    """An episode that was chosen, as the ledger knows it; `body` is what the node of a failed one has sent."""

    id: str
    kept: Kept
    lane: Lane
    group: str
    place: int
    prompt: Prompt
    time: float
    step: int | None = None
    reward: float | None = None
    calls: int = 0
    seconds: float = 0.0
    node: str = ""
    cause: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[KeptSample] = ()
    body: bytes = b""


class KeptEpisodes(Part):
    """Chooses and describes; changes nothing."""

    def __init__(self, base: Base, groups: Groups, lineage: Lineage) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage

    def of_step(self, news: CommitBatch) -> list[KeptEpisode]:
        """Return the episodes of a step that was just committed."""
        kinds = chosen(_rewards(batch_rows(self._db, news.batch, news.policy, 0)), self._rules)
        if not kinds:
            return []
        groups = dict(self._db.all("SELECT n, grp FROM members WHERE batch = ?", (news.batch,)))
        told = {(groups.get(one.member, ""), one.place, one.number): one for one in news.kept}
        step = self._lineage.steps(news.policy)
        return [self._ended(task, kind, step, told) for task, kind in kinds.items()]

    def ended_rounds(self, after: int) -> list[int]:
        """Return the evaluation rounds with a result that have a higher number than `after`."""
        return self._db.column("SELECT id FROM rounds WHERE state = 'ended' AND id > ? ORDER BY id", (after,))

    def of_round(self, number: int) -> list[KeptEpisode]:
        """Return the episodes of an evaluation round that has ended. The same prompts are drawn in each round."""
        rows = self._db.all(
            "SELECT t.id, g.ord, t.place FROM groups g JOIN tasks t ON t.grp = g.id WHERE g.lane = 'eval' "
            "AND g.round = ? AND t.state = 'done'",
            (number,),
        )
        drawn = sorted(rows, key=lambda row: derive_seed(self._rules.seed, "kept", row[1], 0, row[2]))
        step = self._db.value("SELECT step FROM rounds WHERE id = ?", (number,))
        names = [name for name, _, _ in drawn[: self._rules.kept_per_evaluation]]
        return [self._ended(name, "evaluation", step, {}) for name in names]

    def of_failure(self, news: FailTask) -> KeptEpisode | None:
        """Return an episode whose failure was just taken."""
        attempt = self._db.one(
            "SELECT grp, place, node, cause, leased_at, ended_at FROM ended_attempts WHERE id = ? AND state = 'failed'",
            (news.attempt,),
        )
        if attempt is None or news.task != f"{attempt['grp']}.{attempt['place']}":
            return None
        group, place, node, cause, leased_at, ended_at = attempt
        row = self._groups.row(group)
        return KeptEpisode(
            id=news.attempt,
            kept="failure",
            lane=row.lane,
            group=row.id,
            place=place,
            prompt=self._groups.prompt(row.lane, row.ord, row.prompt),
            time=self._clock.now(),
            calls=news.calls,
            seconds=max(ended_at - leased_at, 0.0),
            node=node,
            cause=cause,
            body=news.trajectory,
        )

    def _group(self, task: str) -> tuple[Group, int]:
        """Return the group of a task, and the task's place in it."""
        group, _, place = task.rpartition(".")
        return self._groups.row(group), int(place)

    def _ended(self, name: str, kept: Kept, step: int, told: Mapping[tuple[str, int, int], KeptTokens]) -> KeptEpisode:
        row, place = self._group(name)
        query = "SELECT reward, calls, seconds, node, metrics FROM tasks WHERE grp = ? AND place = ?"
        reward, calls, seconds, node, metrics = self._db.one(query, (row.id, place))
        samples = self._db.rows(
            Sample, f"SELECT {Sample.columns()} FROM samples WHERE grp = ? AND place = ? ORDER BY n", (row.id, place)
        )
        return KeptEpisode(
            id=name,
            kept=kept,
            lane=row.lane,
            group=row.id,
            place=place,
            prompt=self._groups.prompt(row.lane, row.ord, row.prompt),
            time=self._clock.now(),
            step=step,
            reward=reward,
            calls=calls or 0,
            seconds=seconds or 0.0,
            node=node or "",
            metrics=json.loads(metrics or "{}"),
            samples=[
                KeptSample(
                    policy=sample.policy,
                    row=sample.row,
                    reward=sample.reward,
                    truncated=bool(sample.truncated),
                    agent=sample.agent,
                    told=told.get((row.id, place, sample.n)),
                )
                for sample in samples
            ],
        )


# ------------------------------------------------------------ choosing


def marked(rows: Sequence[ServedSample], rules: Rules) -> set[str]:
    """Return the tasks of some parts of a batch that may be among those of the whole batch that are kept."""
    if not rules.kept_per_step and not rules.kept_extremes:
        return set()
    found: set[str] = set()
    for _, part in groupby(rows, key=lambda row: row.part):
        rewards = _rewards(part)
        drawn = _drawn(rewards, rules)
        # Two more than are drawn of the batch: the best and the worst, which are not drawn, may be among them.
        found.update(drawn[: rules.kept_per_step + 2])
        if rules.kept_extremes:
            found.update(_extremes(drawn, rewards))
    return found


def chosen(rewards: Mapping[str, float], rules: Rules) -> dict[str, Kept]:
    """Return the tasks of a batch with these rewards that are kept, and why. Equal rewards have no best and worst."""
    kinds: dict[str, Kept] = {}
    if not rules.kept_per_step and not rules.kept_extremes:
        return kinds
    drawn = _drawn(rewards, rules)
    if rules.kept_extremes and len(set(rewards.values())) > 1:
        best, worst = _extremes(drawn, rewards)
        kinds = {best: "best", worst: "worst"}
    others = [task for task in drawn if task not in kinds]
    return kinds | dict.fromkeys(others[: rules.kept_per_step], "sample")


def _rewards(rows: Iterable[ServedSample]) -> dict[str, float]:
    """Return the mean reward of the samples that each task has in a batch."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(f"{row.grp}.{row.place}", []).append(row.reward)
    return {task: fmean(rewards) for task, rewards in found.items()}


def _drawn(rewards: Mapping[str, float], rules: Rules) -> list[str]:
    """Return all tasks in the order in which they are drawn."""
    return sorted(rewards, key=lambda task: (derive_seed(rules.seed, "kept", task), task))


def _extremes(drawn: Sequence[str], rewards: Mapping[str, float]) -> tuple[str, str]:
    """Return the tasks with the highest and the lowest reward, the first drawn of equals."""
    return max(drawn, key=lambda task: rewards[task]), min(drawn, key=lambda task: rewards[task])
