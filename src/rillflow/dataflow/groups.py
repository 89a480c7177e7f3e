"""Groups: from admission to their one end. Every move keeps the tally by lane, state and cause exact.

A group is playing until all its tasks have ended. Then each policy that has trained tokens in it gives a share to
each stream that trains on that policy; the group is open as long as one of its shares is, and then has the end of
the luckiest.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rillflow.contracts import PromptSource
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.serving import alike, spread
from rillflow.dataflow.shares import Shares, Statistics
from rillflow.dataflow.tables import GROUP_ENDED, SHARE_OPEN
from rillflow.errors import DataError
from rillflow.types import Lane, Prompt

NO_STREAM, TOO_FEW, POLICY_DONE, GROUP_DEADLINE = "no_stream", "too_few", "policy_done", "group_deadline"
_LUCK = ("trained", "expired", "failed", "filtered")


@dataclass(frozen=True)
class CompleteGroup:
    """A complete group, as hooks see it: the episodes in which `policy` has trained tokens, in their places' order."""

    id: str
    prompt: Prompt
    policy: str
    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    staleness: int
    alike: Sequence[Sequence[float]] = ()  # rewards of what is compared, where that is not all of `rewards`

    @property
    def flat(self) -> bool:
        several = self._several()
        return bool(several) and all(min(rewards) == max(rewards) for rewards in several)

    @property
    def deviation(self) -> float:
        return max((spread(rewards)[1] for rewards in self._several()), default=math.inf)

    def _several(self) -> list[Sequence[float]]:
        return [rewards for rewards in (self.alike or [self.rewards]) if len(rewards) > 1]


class Groups(Part):
    def __init__(
        self,
        base: Base,
        *,
        hooks: Hooks,
        sources: dict[Lane, PromptSource],
        lineage: Lineage,
        nodes: Nodes,
        rows: Rows,
        shares: Shares,
    ) -> None:
        super().__init__(base)
        self._hooks = hooks
        self._sources = sources
        self._lineage = lineage
        self._nodes = nodes
        self._rows = rows
        self._shares = shares
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
        return self.count("train", "playing", "open")

    def measured(self, which: str, value: str | int) -> dict[str, float]:
        """The mean of each number that workflows and rewards have kept with the episodes of the groups that the query
        `which` names for `value`, under the name that it has in a line of metrics."""
        rows = self._db.all(
            "SELECT j.key AS name, avg(j.value) AS mean FROM tasks t, json_each(t.metrics) j WHERE t.state = 'done' "
            f"AND t.metrics != '{{}}' AND t.grp IN ({which}) GROUP BY j.key",
            (value,),
        )
        return {f"episode/{row['name']}": row["mean"] for row in rows}

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

    def row(self, group: str) -> sqlite3.Row:
        row = self._db.one("SELECT * FROM groups WHERE id = ?", (group,))
        assert row is not None, group
        return row

    def _move(self, row: sqlite3.Row, state: str, cause: str = "") -> None:
        if (row["state"], row["cause"]) == (state, cause):
            return
        ended = self._clock.now() if state in GROUP_ENDED else None
        self._db.run(
            "UPDATE groups SET state = ?, cause = ?, ended_at = ?, scoring = 0 WHERE id = ?",
            (state, cause, ended, row["id"]),
        )
        self._tally(row["lane"], row["state"], row["cause"], -1)
        self._tally(row["lane"], state, cause, 1)

    def settle(self, group: str, *, scored: bool = False) -> bool:
        """End the group's playing, once all its tasks have ended and, where the run has a group's reward, it is
        `scored`."""
        if self._db.value("SELECT 1 FROM tasks WHERE grp = ? AND state IN ('pending', 'leased') LIMIT 1", (group,)):
            return False
        row = self.row(group)
        done = self._db.value("SELECT count(*) FROM tasks WHERE grp = ? AND state = 'done'", (group,))
        needed = 2 if row["lane"] == "train" and row["planned"] > 1 else 1
        if done < needed:
            self._fail(row)
        elif self._rules.group_reward and not scored:
            self._db.run("UPDATE groups SET scoring = 1 WHERE id = ?", (group,))
            return False
        elif row["lane"] == "eval":
            self._move(row, "evaluated")
        else:
            self._share_out(row, needed)
            self._db.run("DELETE FROM group_versions WHERE grp = ?", (group,))
            self._close(row)
        return True

    def _fail(self, row: sqlite3.Row) -> None:
        cause = self._db.value(
            "SELECT cause FROM tasks WHERE grp = ? AND state IN ('failed', 'cancelled') "
            "ORDER BY state DESC, place DESC LIMIT 1",
            (row["id"],),
        )
        self._drop(row["id"])
        self._move(row, "failed", str(cause))

    def _drop(self, group: str) -> None:
        """The group ends as it is: nobody will ask for what its episodes have left."""
        self._db.run("DELETE FROM group_versions WHERE grp = ?", (group,))
        self._rows.release(group)

    def close(self, group: str) -> None:
        """The group's state, as its shares have it."""
        self._close(self.row(group))

    def _close(self, row: sqlite3.Row) -> None:
        shares = self._shares.of(row["id"])
        if any(share["state"] in SHARE_OPEN for share in shares):
            self._move(row, "open")
        elif not shares:
            self._move(row, "filtered", NO_STREAM)
        else:
            luckiest = min(shares, key=lambda share: _LUCK.index(share["state"]))
            self._move(row, luckiest["state"], luckiest["cause"])

    # ------------------------------------------------------------ shares

    def _share_out(self, row: sqlite3.Row, needed: int) -> None:
        """Take each producer's statistics, let the filters judge it, and give the streams their shares."""
        episodes: dict[str, list[sqlite3.Row]] = {}
        for episode in self._db.all(
            "SELECT policy, sum(trained) AS trained, max(truncated) AS truncated, avg(reward) AS reward, "
            "min(oldest) AS oldest, max(newest) AS newest, count(*) AS samples, sum(tokens) AS tokens, "
            "min(live) AS live FROM samples WHERE grp = ? AND trained > 0 GROUP BY policy, place ORDER BY place",
            (row["id"],),
        ):
            episodes.setdefault(episode["policy"], []).append(episode)
        for producer in [name for name, found in episodes.items() if not all(episode["live"] for episode in found)]:
            del episodes[producer]  # some of its rows were released, when no stream wanted them
            self._rows.release(row["id"], producer)
        prompt = self.prompt(row["lane"], row["ord"], row["prompt"])
        known = {(share["producer"], share["stream"]) for share in self._shares.of(row["id"])}
        for producer in self._rules.policies:
            if producer in episodes:
                self._share(row, producer, episodes=episodes[producer], prompt=prompt, needed=needed, known=known)
        self._remember(row["id"], episodes)

    def _share(
        self,
        row: sqlite3.Row,
        producer: str,
        *,
        episodes: Sequence[sqlite3.Row],
        prompt: Prompt,
        needed: int,
        known: set[tuple[str, str]],
    ) -> None:
        statistics = _statistics(episodes)
        view = CompleteGroup(
            id=row["id"],
            prompt=prompt,
            policy=producer,
            rewards=[episode["reward"] for episode in episodes],
            lengths=[episode["trained"] for episode in episodes],
            truncated=[bool(episode["truncated"]) for episode in episodes],
            staleness=max(0, self._lineage.head(producer) - statistics.oldest),
            alike=self._alike(row["id"], producer),
        )
        if producer == self._rules.policy:
            self._hooks.observe(view)
        held = False
        state, cause = self._hooks.verdict(view) if len(episodes) >= needed else ("filtered", TOO_FEW)
        for stream in self._rules.streams_of(producer):
            if (producer, stream) in known:
                continue  # it ended before some tasks of the group had to be played again
            over = state == "ready" and self._lineage.done(stream)
            end = ("expired", POLICY_DONE) if over else (state, cause)
            self._shares.create((row["id"], producer, stream), row["ord"], *end, statistics)
            held = held or end[0] == "ready"
        if not held:
            self._rows.release(row["id"], producer)

    def _alike(self, group: str, producer: str) -> list[list[float]]:
        grouping = self._rules.grouping
        return [] if grouping == "policy" else list(alike(self._db, group, producer, grouping).values())

    def _remember(self, group: str, episodes: dict[str, list[sqlite3.Row]]) -> None:
        """What a stream's next step says of what was played: of its own policy's part in it, if it has one."""
        for stream in self._lineage.unfinished():
            for producer in (stream, *self._rules.policies[stream].producers):
                if producer in episodes:
                    rewards = [episode["reward"] for episode in episodes[producer]]
                    flat = len(rewards) > 1 and min(rewards) == max(rewards)
                    values = (stream, group, fmean(rewards), flat, len(rewards), self._clock.now())
                    self._db.run("INSERT OR REPLACE INTO recent VALUES (?, ?, ?, ?, ?, ?)", values)
                    break

    # ------------------------------------------------------------ ending early

    def end(self, group: str, state: str, cause: str) -> None:
        """End a group that is playing before its turn; tasks that are not done are cancelled."""
        self.cancel(group, cause)
        self._drop(group)
        self._move(self.row(group), state, cause)

    def cancel(self, group: str, cause: str) -> None:
        """Cancel the tasks that are not done."""
        for task in self._db.all(
            "SELECT id, lane, attempt, node, state FROM tasks WHERE grp = ? AND state IN ('pending', 'leased')",
            (group,),
        ):
            if task["state"] == "leased":
                self._nodes.gave_up(task["node"], task["lane"])
                self._db.run(
                    "UPDATE attempts SET state = 'cancelled', cause = ?, ended_at = ? WHERE id = ?",
                    (cause, self._clock.now(), task["attempt"]),
                )
            self._db.run("UPDATE tasks SET state = 'cancelled', cause = ? WHERE id = ?", (cause, task["id"]))

    def close_late(self) -> None:
        """Groups that took too long since their first lease go on with the episodes that are done."""
        if self._rules.group_deadline is None:
            return
        for row in self._db.all(
            "SELECT id FROM groups WHERE lane = 'train' AND state = 'playing' AND scoring = 0 AND started < ? "
            "ORDER BY ord",
            (self._clock.now() - self._rules.group_deadline,),
        ):
            self.cancel(row["id"], GROUP_DEADLINE)
            self._db.count(f"cancelled.{GROUP_DEADLINE}")
            self.settle(row["id"])

    def grace(self) -> None:
        """Nobody was heard, or the clock was set: groups that are playing have their full time again."""
        self._db.run(
            "UPDATE groups SET started = ? WHERE lane = 'train' AND state = 'playing' AND started IS NOT NULL",
            (self._clock.now(),),
        )

    # ------------------------------------------------------------ playing again

    def rerun(self, group: str, places: Iterable[int], cause: str) -> int:
        """Play the done tasks at these places again: same order, same seeds, no attempt used up.

        What they left is forgotten. Shares that are ready have never been; those that ended stay as they are.
        Only for groups of which no share is leased or trained. Returns how many tasks went back.
        """
        number = sum(self._again(group, place, cause) for place in places)
        if number:
            self._db.count(f"rerun.{cause}", number)
            self._reopen(group)
        return number

    def _again(self, group: str, place: int, cause: str) -> bool:
        task = self._db.one(
            "SELECT id, attempt FROM tasks WHERE grp = ? AND place = ? AND state = 'done'", (group, place)
        )
        if task is None:
            return False
        self._rows.forget(group, place)
        self._db.run("UPDATE attempts SET state = 'returned', cause = ? WHERE id = ?", (cause, task["attempt"]))
        self._db.run(
            "UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL, reward = NULL, samples = 0 WHERE id = ?",
            (task["id"],),
        )
        return True

    def rerun_sampled(self, group: str, producer: str, low: int, high: int, cause: str) -> int:
        """Those tasks in which `producer` may have trained tokens of versions v with low < v <= high."""
        rows = self._db.all(
            "SELECT DISTINCT place FROM samples WHERE grp = ? AND policy = ? AND trained > 0 AND newest > ? "
            "AND oldest <= ? ORDER BY place",
            (group, producer, low, high),
        )
        return self.rerun(group, [row["place"] for row in rows], cause)

    def rerun_dead(self, producer: str, low: int, high: int) -> int:
        """The same everywhere, after these versions have died. What can no longer be played again expires."""
        rerun = 0
        for group in self._with_versions(producer, low, high):
            if self._shares.untouched(group):
                rerun += self.rerun_sampled(group, producer, low, high, "rolled_back")
            else:
                self.expire_ready(group, producer, "rolled_back")
        return rerun

    def _with_versions(self, producer: str, low: int, high: int) -> list[str]:
        """Groups that are playing, or have a share that is ready, with tokens of these versions."""
        rows = self._db.all(
            "SELECT g.id AS id, g.ord AS ord FROM group_versions v JOIN groups g ON g.id = v.grp "
            "WHERE v.producer = ? AND v.newest > ? AND v.oldest <= ?",
            (producer, low, high),
        )
        for stream in self._rules.streams_of(producer):
            rows += self._db.all(
                "SELECT grp AS id, ord FROM shares WHERE stream = ? AND state = 'ready' AND producer = ? "
                "AND newest > ? AND oldest <= ?",
                (stream, producer, low, high),
            )
        train = [group for _, group in sorted({(row["ord"], row["id"]) for row in rows})]
        evaluated = self._db.all(
            "SELECT DISTINCT g.id, g.round, g.ord FROM groups g JOIN samples s ON s.grp = g.id WHERE g.lane = 'eval' "
            "AND g.state = 'playing' AND s.policy = ? AND s.trained > 0 AND s.newest > ? AND s.oldest <= ? "
            "ORDER BY g.round, g.ord",
            (producer, low, high),
        )
        return train + [row["id"] for row in evaluated]

    def expire_ready(self, group: str, producer: str, cause: str) -> None:
        """The producer's shares that no stream has taken yet expire."""
        for share in self._shares.of(group):
            if share["producer"] == producer and share["state"] == "ready":
                self._shares.end(share, "expired", cause)
        self.close(group)

    def _reopen(self, group: str) -> None:
        for share in self._shares.of(group):
            if share["state"] == "ready":
                self._shares.remove(share)
        row = self.row(group)
        self._move(row, "playing")
        self._db.run("UPDATE groups SET started = NULL, scoring = 0 WHERE id = ?", (group,))
        self._db.run("DELETE FROM group_versions WHERE grp = ?", (group,))
        if row["lane"] == "train":
            self._db.run(
                "INSERT INTO group_versions SELECT grp, policy, min(oldest), max(newest) FROM samples "
                "WHERE grp = ? AND trained > 0 AND live = 1 GROUP BY policy",
                (group,),
            )


def _statistics(episodes: Sequence[sqlite3.Row]) -> Statistics:
    rewards = [episode["reward"] for episode in episodes]
    mean, std = spread(rewards)
    return Statistics(
        oldest=min(episode["oldest"] for episode in episodes),
        newest=max(episode["newest"] for episode in episodes),
        mean=mean,
        std=std,
        size=len(rewards),
        samples=sum(episode["samples"] for episode in episodes),
        tokens=sum(episode["tokens"] for episode in episodes),
    )
