"""Rewards of whole groups, in the ledger: which groups wait for theirs, and what follows from it.

Invariants: where a run has a group's reward, a complete group of which enough episodes ended well is settled by
`score` or `fail` alone. In that same transition the reward of each of its episodes becomes what its node gave plus what
the group's reward says. Episodes that are played again take their group back; what the others were given by their nodes
is kept, and the group is scored again when it is complete. An answer about episodes of which one was played again since
is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rillflow.dataflow.completions import LARGEST_REWARD
from rillflow.dataflow.groups import Groups
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.types import EpisodeFacts, Prompt, Row, Scored

REWARD_ERROR = "reward_error"


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode of a complete group. `row` has its transcript and answer; None where nobody keeps its rows."""

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
    def __init__(self, base: Base, groups: Groups, rows: Rows) -> None:
        super().__init__(base)
        self._groups = groups
        self._rows = rows

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
        rows = self._db.all("SELECT id FROM groups WHERE scoring = 1 ORDER BY lane, ord LIMIT ?", (limit,))
        found = [row["id"] for row in rows if row["id"] not in without]
        return found if most < 0 else found[:most]

    def group(self, group: str) -> UnscoredGroup | None:
        """Return the group, or None where it waits no more."""
        row = self._groups.row(group)
        if not row["scoring"]:
            return None
        prompt = self._groups.prompt(row["lane"], row["ord"], row["prompt"])
        rows = self._transcripts(group)
        episodes = [
            ScoredEpisode(
                place=task["place"],
                attempt=task["attempt"],
                facts=EpisodeFacts(
                    task=task["id"],
                    prompt=prompt.id,
                    policies=list(self._rules.policies),
                    seed=task["seed"],
                    evaluating=row["lane"] == "eval",
                    seconds=task["seconds"],
                ),
                metrics=json.loads(task["metrics"]),
                given=task["given"],
                row=rows.get(task["place"]),
            )
            for task in self._db.all("SELECT * FROM tasks WHERE grp = ? AND state = 'done' ORDER BY place", (group,))
        ]
        return UnscoredGroup(group, prompt, row["planned"], episodes)

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
            at = (group.id, episode.place)
            self._db.run(
                "UPDATE tasks SET reward = ?, metrics = ? WHERE grp = ? AND place = ?",
                (total, json.dumps(metrics), *at),
            )
            self._db.run("UPDATE samples SET reward = ? WHERE grp = ? AND place = ?", (total, *at))
        self._db.clear_counter("failures_in_a_row")
        self._groups.settle(group.id, scored=True)
        return True

    def fail(self, group: UnscoredGroup, error: str) -> bool:
        """There is no reward: the group's episodes have failed for good; False where it is not as it was."""
        if not self._is_still(group):
            return False
        now = self._clock.now()
        for episode in group.episodes:
            self._rows.forget(group.id, episode.place)
            self._db.run(
                "UPDATE attempts SET state = 'failed', cause = ?, ended_at = ? WHERE id = ?",
                (REWARD_ERROR, now, episode.attempt),
            )
            self._db.run(
                "UPDATE tasks SET state = 'failed', cause = ?, error = ?, failures = failures + 1, attempt = NULL, "
                "node = NULL, reward = NULL, samples = 0 WHERE grp = ? AND place = ?",
                (REWARD_ERROR, error, group.id, episode.place),
            )
        self._db.count("failures_in_a_row", len(group.episodes))
        self._db.count(f"failures.{REWARD_ERROR}", len(group.episodes))
        self._db.set_meta("last_failure", f"{REWARD_ERROR}: {error}")
        self._groups.settle(group.id)
        return True

    def _is_still(self, group: UnscoredGroup) -> bool:
        """Return whether the group waits for a reward of these very episodes."""
        now = self.group(group.id)
        return now is not None and [e.attempt for e in now.episodes] == [e.attempt for e in group.episodes]
