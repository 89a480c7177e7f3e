"""Rewards of whole groups, in the ledger: which groups wait for theirs, and what follows from it.

Invariants: where a run has a group's reward, a complete group of which enough episodes ended well is settled by
`score` or `fail` alone. In that same transition the reward of each of its episodes becomes what its node gave plus what
the group's reward says. Episodes that are played again take their group back; what the others were given by their nodes
is kept, and the group is scored again when it is complete. An answer about episodes of which one was played again since
is dropped. Writes no table: `tasks` and `groups` do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rillflow.dataflow.ledger.attempts import LARGEST_REWARD
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.tasks import FAILURES_IN_A_ROW, Tasks
from rillflow.types import EpisodeFacts, Prompt, Row, Scored

REWARD_ERROR = "reward_error"


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode of a complete group. `row` has its transcript and answer; None if its rows are not kept."""

    place: int
    attempt: str
    facts: EpisodeFacts
    metrics: dict[str, float]
    given: float
    row: Row | None


@dataclass(frozen=True)
class UnscoredGroup:
    """A complete group that waits for its reward: its episodes that ended well, of the `planned` ones."""

    id: str
    prompt: Prompt
    planned: int
    episodes: list[ScoredEpisode]


class Scoring(Part):
    def __init__(self, base: Base, groups: Groups, tasks: Tasks) -> None:
        super().__init__(base)
        self._groups = groups
        self._tasks = tasks

    def open(self) -> None:
        """A run that was resumed without a group's reward goes on with what its nodes gave."""
        if not self._rules.group_reward:
            for group in self.waiting(-1):
                self._groups.settle(group)

    @property
    def count(self) -> int:
        """How many groups wait for their reward."""
        return int(self._db.value("SELECT count(*) FROM groups WHERE scoring = 1"))

    def waiting(self, most: int, without: Collection[str] = ()) -> list[str]:
        """Return the ids of groups that wait for their reward, the oldest first; -1 for all of them."""
        limit = most if most < 0 else most + len(without)
        ids = self._db.column("SELECT id FROM groups WHERE scoring = 1 ORDER BY lane, ord LIMIT ?", (limit,))
        found = [group for group in ids if group not in without]
        return found if most < 0 else found[:most]

    def group(self, group: str) -> UnscoredGroup | None:
        """Return the group, or None where it waits no more."""
        row = self._groups.row(group)
        if not row.scoring:
            return None
        prompt = self._groups.prompt(row.lane, row.ord, row.prompt)
        rows = self._transcripts(group)
        query = (
            "SELECT id, place, attempt, seed, seconds, metrics, given FROM tasks WHERE grp = ? AND state = 'done' "
            "ORDER BY place"
        )
        episodes = [
            ScoredEpisode(
                place=place,
                attempt=attempt,
                facts=EpisodeFacts(
                    task=task,
                    prompt=prompt.id,
                    policies=list(self._rules.policies),
                    seed=seed,
                    evaluating=row.lane == "eval",
                    seconds=seconds,
                ),
                metrics=json.loads(metrics),
                given=given,
                row=rows.get(place),
            )
            for task, place, attempt, seed, seconds, metrics, given in self._db.all(query, (group,))
        ]
        return UnscoredGroup(group, prompt, row.planned, episodes)

    def _transcripts(self, group: str) -> dict[int, Row]:
        """Return the row of each episode that has its transcript: see `rollout.push`."""
        found: dict[int, Row] = {}
        for place, unit, segment, offset, length in self._db.all(
            "SELECT place, unit, segment, offset, length FROM samples WHERE grp = ? AND live = 1 "
            "ORDER BY place, trained = 0, n",
            (group,),
        ):
            found.setdefault(place, Row(unit=unit, segment=segment, offset=offset, length=length))
        return found

    # ------------------------------------------------------------ endings

    def score(self, group: UnscoredGroup, rewards: Sequence[Scored]) -> bool:
        """Add what the group's reward says to each episode's, and settle the group; False where it is not as it was."""
        if not self._is_still(group):
            return False
        totals = [episode.given + reward for episode, reward in zip(group.episodes, rewards, strict=True)]
        if not all(abs(total) <= LARGEST_REWARD for total in totals):
            return self.fail(group, f"rewards {totals!r:.200}: not finite, or too large")
        for episode, reward, total in zip(group.episodes, rewards, totals, strict=True):
            metrics = episode.metrics | {f"reward/{label}": part for label, part in reward.parts.items()}
            self._tasks.reward(group.id, episode.place, total, metrics)
        self._db.clear_counter(FAILURES_IN_A_ROW)
        self._groups.settle(group.id, scored=True)
        return True

    def fail(self, group: UnscoredGroup, error: str) -> bool:
        """Fail the group's episodes, which have no reward; returns False if the group has changed."""
        if not self._is_still(group):
            return False
        episodes = [(episode.place, episode.attempt) for episode in group.episodes]
        self._tasks.fail_done(group.id, episodes, REWARD_ERROR, error)
        self._groups.settle(group.id)
        return True

    def _is_still(self, group: UnscoredGroup) -> bool:
        """Return whether the group waits for a reward of these very episodes."""
        now = self.group(group.id)
        return now is not None and [e.attempt for e in now.episodes] == [e.attempt for e in group.episodes]
