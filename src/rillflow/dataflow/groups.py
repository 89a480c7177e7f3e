"""Groups: from admission to their one end. Every move keeps the tally by lane, state and cause exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.contracts import PromptSource
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.tables import GROUP_ENDED, NEWEST
from rillflow.errors import DataError
from rillflow.types import Lane, Prompt


@dataclass(frozen=True)
class CompleteGroup:
    """A complete group, as hooks see it: its successful episodes in their places' order."""

    id: str
    prompt: Prompt
    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]


class Groups(Part):
    def __init__(self, base: Base, hooks: Hooks, sources: dict[Lane, PromptSource]) -> None:
        super().__init__(base)
        self._hooks = hooks
        self._sources = sources
        self.moves = 0  # since the ledger was opened: a hint that something may follow, not a state

    # ------------------------------------------------------------ counting

    def count(self, lane: Lane, *states: str) -> int:
        marks = ",".join("?" * len(states))
        return int(
            self._db.value(
                f"SELECT ifnull(sum(n), 0) FROM tally WHERE lane = ? AND state IN ({marks})", (lane, *states)
            )
        )

    @property
    def outstanding(self) -> int:
        """Train groups that were admitted and have not ended."""
        return self.count("train", "playing", "ready", "leased")

    def window_end(self) -> int:
        """The last position whose group may be played now.

        After a rollback more groups are open than the window has room for: those beyond wait as if not yet admitted.
        """
        last = self._db.value(
            "SELECT ord FROM groups WHERE lane = 'train' AND state IN ('playing', 'ready', 'leased') "
            "ORDER BY ord LIMIT 1 OFFSET ?",
            (self._rules.window - 1,),
        )
        return NEWEST if last is None else int(last)

    def _tally(self, lane: str, state: str, cause: str, by: int) -> None:
        self.moves += 1
        self._db.run(
            "INSERT INTO tally VALUES (?, ?, ?, ?) ON CONFLICT (lane, state, cause) DO UPDATE SET n = n + excluded.n",
            (lane, state, cause, by),
        )

    # ------------------------------------------------------------ admission

    def create(self, lane: Lane, index: int, *, size: int, number: int = 0, step: int = 0) -> None:
        """Admit the prompt at `index`; `number` and `step` are those of its evaluation round."""
        group = f"t{index:06d}" if lane == "train" else f"e{number}.{index:06d}"
        prompt = self._sources[lane].at(index)
        self._db.run(
            "INSERT INTO groups (id, lane, round, ord, prompt, planned, state, admitted_at) "
            "VALUES (?, ?, ?, ?, ?, ?, 'playing', ?)",
            (group, lane, number, index, prompt.id, size, self._clock.now()),
        )
        self._tally(lane, "playing", "", 1)
        self._db.count(f"admitted.{lane}")
        # The seed knows the step of an evaluation, not its number: an evaluation repeated after a rollback is equal.
        self._db.many(
            "INSERT INTO tasks (id, grp, lane, round, ord, place, seed) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (f"{group}.{place}", group, lane, number, index, place, self._seed(lane, index, step, place))
                for place in range(size)
            ],
        )

    def _seed(self, lane: Lane, index: int, step: int, place: int) -> int:
        return derive_seed(self._rules.seed, lane, index, step, place)

    def prompt(self, lane: Lane, index: int, expected: str) -> Prompt:
        prompt = self._sources[lane].at(index)
        if prompt.id != expected:
            raise DataError(
                f"prompt {index} of the {lane} lane was {expected!r} when it was admitted and is {prompt.id!r} now",
                "restore the prompts that the run was started with",
            )
        return prompt

    # ------------------------------------------------------------ moves

    def move(self, group: str, state: str, cause: str = "") -> None:
        row = self._db.one("SELECT lane, state, cause FROM groups WHERE id = ?", (group,))
        assert row is not None, group
        ended = self._clock.now() if state in GROUP_ENDED else None
        self._db.run("UPDATE groups SET state = ?, cause = ?, ended_at = ? WHERE id = ?", (state, cause, ended, group))
        self._tally(row["lane"], row["state"], row["cause"], -1)
        self._tally(row["lane"], state, cause, 1)

    def settle(self, group: str) -> bool:
        """Take the group's statistics and end its playing, once all its tasks have ended."""
        if self._db.value("SELECT 1 FROM tasks WHERE grp = ? AND state IN ('pending', 'leased') LIMIT 1", (group,)):
            return False
        row = self._db.one("SELECT lane, ord, prompt, planned FROM groups WHERE id = ?", (group,))
        assert row is not None, group
        rewards = [
            task["reward"]
            for task in self._db.all(
                "SELECT reward FROM tasks WHERE grp = ? AND state = 'done' ORDER BY place", (group,)
            )
        ]
        needed = 2 if row["lane"] == "train" and row["planned"] > 1 else 1
        if len(rewards) < needed:
            self.move(group, "failed", self._cause_of_failure(group))
        else:
            self._stamp(group, rewards)
            self.move(group, *self._verdict(group, row["lane"], row["ord"], row["prompt"], rewards))
        return True

    def _stamp(self, group: str, rewards: Sequence[float]) -> None:
        mean, std = float(np.mean(rewards)), float(np.std(rewards))
        self._db.run("UPDATE groups SET mean = ?, std = ?, size = ? WHERE id = ?", (mean, std, len(rewards), group))

    def _verdict(self, group: str, lane: Lane, index: int, prompt: str, rewards: Sequence[float]) -> tuple[str, str]:
        if lane == "eval":
            return "evaluated", ""
        flat = len(rewards) > 1 and min(rewards) == max(rewards)
        self._db.run("INSERT OR REPLACE INTO recent VALUES (?, ?, ?)", (group, float(np.mean(rewards)), flat))
        view = self._view(group, self.prompt(lane, index, prompt), rewards)
        self._hooks.observe(view)
        return self._hooks.verdict(view)

    def _view(self, group: str, prompt: Prompt, rewards: Sequence[float]) -> CompleteGroup:
        rows = self._db.all(
            "SELECT sum(s.trained) AS trained, max(s.truncated) AS truncated FROM tasks t "
            "JOIN samples s ON s.grp = t.grp AND s.task = t.id "
            "WHERE t.grp = ? AND t.state = 'done' GROUP BY t.id ORDER BY t.place",
            (group,),
        )
        return CompleteGroup(
            id=group,
            prompt=prompt,
            rewards=rewards,
            lengths=[row["trained"] for row in rows],
            truncated=[bool(row["truncated"]) for row in rows],
        )

    def _cause_of_failure(self, group: str) -> str:
        row = self._db.one(
            "SELECT cause FROM tasks WHERE grp = ? AND state = 'failed' ORDER BY place DESC LIMIT 1", (group,)
        )
        assert row is not None, group
        return str(row["cause"])

    def end(self, group: str, state: str, cause: str) -> None:
        """End an open group before its turn; tasks that are not done are cancelled."""
        for task in self._db.all(
            "SELECT id, attempt, state FROM tasks WHERE grp = ? AND state IN ('pending', 'leased')", (group,)
        ):
            if task["state"] == "leased":
                self._db.run(
                    "UPDATE attempts SET state = 'cancelled', cause = ?, ended_at = ? WHERE id = ?",
                    (cause, self._clock.now(), task["attempt"]),
                )
            self._db.run("UPDATE tasks SET state = 'cancelled', cause = ? WHERE id = ?", (cause, task["id"]))
        self.move(group, state, cause)

    # ------------------------------------------------------------ playing again

    def rerun(self, group: str, low: int, high: int, cause: str) -> int:
        """Play the group's done tasks again that may have trained tokens of versions v with low < v <= high.

        Same order, same seeds, no attempt used up. What they left is forgotten. Returns how many went back.
        """
        rows = self._db.all(
            "SELECT DISTINCT t.id, t.attempt FROM tasks t JOIN samples s ON s.grp = t.grp AND s.task = t.id "
            "WHERE t.grp = ? AND t.state = 'done' AND s.trained > 0 AND s.newest > ? AND s.oldest <= ?",
            (group, low, high),
        )
        for row in rows:
            self._db.run("DELETE FROM samples WHERE grp = ? AND task = ?", (group, row["id"]))
            self._db.run("UPDATE attempts SET state = 'returned', cause = ? WHERE id = ?", (cause, row["attempt"]))
            self._db.run(
                "UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL, reward = NULL, samples = 0 "
                "WHERE id = ?",
                (row["id"],),
            )
        if rows:
            self._db.count(f"rerun.{cause}", len(rows))
            self._reopen(group)
        return len(rows)

    def rerun_dead(self, low: int, high: int) -> int:
        """The same for all open groups, after these versions have died."""
        rows = self._db.all(
            "SELECT id FROM groups WHERE state IN ('playing', 'ready') AND newest > ? AND oldest <= ? "
            "ORDER BY lane, round, ord",
            (low, high),
        )
        return sum(self.rerun(row["id"], low, high, "rolled_back") for row in rows)

    def _reopen(self, group: str) -> None:
        self._db.run(
            "UPDATE groups SET mean = NULL, std = NULL, size = NULL, "
            "oldest = (SELECT min(oldest) FROM samples WHERE grp = groups.id AND trained > 0), "
            "newest = (SELECT max(newest) FROM samples WHERE grp = groups.id AND trained > 0) WHERE id = ?",
            (group,),
        )
        if self._db.value("SELECT state FROM groups WHERE id = ?", (group,)) != "playing":
            self.move(group, "playing")
