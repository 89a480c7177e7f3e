"""Evaluation rounds: all held-out prompts, played by weights at least as new as the policy was when it was asked.

A round is admitted before training, every `evaluate_every` steps of the first policy and after the last one. It names
a version of every policy. Its groups are played like others but never enter a batch. On-policy runs wait for a round
before they train on, so that it measures exactly the versions it names. A round of a version of the first policy that
died is orphaned with it, and asked for again. The rows of its episodes are kept as long as it runs.

The reward of a round is the mean over its episodes; where the prompts are of several sources, the mean of the sources'
means, each counting the same, and nothing where one of them has none. The best round is the one with the highest
reward, the latest of equals: the versions that it names, and those of rounds that run, are `wanted` in the weight
stores.

A run with a target ends as soon as a round has `reached` it. Such a round has ended without a failed episode, and no
version that it names has died. Rounds that still run at that moment are cancelled.

The only writer of rounds and round_sources.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from rillflow.contracts import PromptSource
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.payload import Samples
from rillflow.dataflow.ledger.tables import Round
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import Evaluation

_MOST_RESULTS = 100
_ROUND = f"SELECT {Round.columns()} FROM rounds"


class Evaluations(Part):
    def __init__(
        self, base: Base, groups: Groups, lineage: Lineage, samples: Samples, heldout: PromptSource | None
    ) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._samples = samples
        self._heldout = heldout
        self._prompts = heldout.length if heldout else 0
        self._known: list[Round] = []  # that run, as long as nothing was taken back and no round has changed
        self._read_at = -1

    def schedule(self, *, final: bool) -> None:
        """Admit the round that is due at the present step, once."""
        step, every = self._lineage.steps(self._rules.policy), self._rules.evaluate_every
        due = final or step == 0 or (every > 0 and step % every == 0)
        heads, planned = self._lineage.heads, self._prompts * self._rules.repeats
        if not due or not planned or self._asked(step, heads if final else None):
            return
        number = int(self._db.value("SELECT ifnull(max(id), -1) + 1 FROM rounds"))
        self._read_at = -1
        self._db.run(
            "INSERT INTO rounds (id, step, version, versions, state, planned, admitted_at) "
            "VALUES (?, ?, ?, ?, 'running', ?, ?)",
            (number, step, heads[self._rules.policy], json.dumps(heads), planned, self._clock.now()),
        )
        self._groups.create("eval", range(self._prompts), size=self._rules.repeats, number=number, step=step)

    def _asked(self, step: int, heads: dict[str, int] | None) -> bool:
        """Return whether there is a round of this step; with `heads`, of these versions: others may have gone on."""
        query = "SELECT versions FROM rounds WHERE step = ? AND state NOT IN ('orphaned', 'cancelled')"
        return any(heads is None or json.loads(versions) == heads for versions in self._db.column(query, (step,)))

    def _running(self) -> list[Round]:
        if self._read_at != self._db.rollbacks:
            self._known = self._db.rows(Round, f"{_ROUND} WHERE state = 'running' ORDER BY id")
            self._read_at = self._db.rollbacks
        return self._known

    def playable(self, versions: Mapping[str, int]) -> list[int]:
        """Return the running rounds that a node on these versions may play."""
        return [
            running.id
            for running in self._running()
            if all(versions.get(policy, -1) >= version for policy, version in json.loads(running.versions).items())
        ]

    @property
    def running(self) -> bool:
        return bool(self._running())

    @property
    def reached(self) -> bool:
        """Return whether a round has reached the run's target, if it has one."""
        if self._rules.target is None:
            return False
        query = "SELECT versions FROM rounds WHERE state = 'ended' AND failed = 0 AND reward >= ?"
        return any(self._lives(json.loads(versions)) for versions in self._db.column(query, (self._rules.target,)))

    def _lives(self, versions: dict[str, int]) -> bool:
        return not any(self._lineage.died(policy, version, version) for policy, version in versions.items())

    def waiting_for(self) -> str:
        """Describe what the first running round still needs; empty if no round is running."""
        running = self._running()
        if not running:
            return ""
        first = running[0]
        left = self._db.value(
            "SELECT count(*) FROM groups g JOIN tasks t ON t.grp = g.id WHERE g.lane = 'eval' AND g.round = ? "
            "AND g.state = 'playing' AND t.state IN ('pending', 'leased')",
            (first.id,),
        )
        scoring = self._db.value(
            "SELECT count(*) FROM groups WHERE lane = 'eval' AND round = ? AND scoring = 1", (first.id,)
        )
        rewards = f", {scoring} groups wait for their reward" if scoring else ""
        return f"the evaluation of version {first.version}: {left} of {first.planned} episodes left{rewards}"

    def close(self) -> None:
        """End the rounds whose groups have all ended."""
        for running in self._running():
            query = "SELECT 1 FROM groups WHERE lane = 'eval' AND round = ? AND state = 'playing' LIMIT 1"
            if not self._db.value(query, (running.id,)):
                self._end(running)

    def _end(self, ended: Round) -> None:
        done, failed, mean = self._db.one(
            "SELECT sum(t.state = 'done'), sum(t.state != 'done'), avg(CASE WHEN t.state = 'done' THEN t.reward END) "
            "FROM groups g JOIN tasks t ON t.grp = g.id WHERE g.lane = 'eval' AND g.round = ?",
            (ended.id,),
        )
        now, sources = self._clock.now(), self._by_source(ended.id)
        reward = _average(list(sources.values())) if sources else mean
        self._read_at = -1
        self._db.run(
            "UPDATE rounds SET state = 'ended', reward = ?, episodes = ?, failed = ?, ended_at = ? WHERE id = ?",
            (reward, done, failed, now, ended.id),
        )
        self._db.many(
            "INSERT INTO round_sources (round, source, reward) VALUES (?, ?, ?)",
            [(ended.id, source, mean) for source, mean in sources.items()],
        )
        self._release(ended.id)
        self._db.event(
            {
                **self._groups.measured("SELECT id FROM groups WHERE lane = 'eval' AND round = ?", ended.id),
                "event": "evaluation",
                "step": ended.step,
                "version": ended.version,
                "versions": json.loads(ended.versions),
                "reward": reward,
                "by_source": sources,
                "episodes": done,
                "failed": failed,
                "time": now,
            }
        )

    def _by_source(self, number: int) -> dict[str, float | None]:
        """The mean reward of each source's episodes; none where the prompts are of one source."""
        assert self._heldout is not None
        rewards: dict[str, list[float]] = defaultdict(list)
        for index, reward, state in self._db.all(
            "SELECT g.ord, t.reward, t.state FROM groups g JOIN tasks t ON t.grp = g.id "
            "WHERE g.lane = 'eval' AND g.round = ? ORDER BY g.ord",
            (number,),
        ):
            of_source = rewards[self._heldout.at(index).source]
            if state == "done":
                of_source.append(reward)
        rewards.pop("", None)
        return {source: fmean(found) if found else None for source, found in rewards.items()}

    def wanted(self, policy: str) -> list[int]:
        """Versions of a policy that are to stay in its weight store: those of the best round and of running ones."""
        best = self._db.rows(
            Round,
            f"{_ROUND} WHERE state = 'ended' AND reward IS NOT NULL ORDER BY reward DESC, step DESC, id DESC LIMIT 1",
        )
        return sorted({json.loads(found.versions).get(policy, 0) for found in (*self._running(), *best)})

    def _release(self, number: int) -> None:
        for group in self._db.column("SELECT id FROM groups WHERE lane = 'eval' AND round = ?", (number,)):
            self._samples.release(group)

    def cancel(self) -> None:
        """End the running rounds without a result: the run has reached its target."""
        for running in self._running():
            self._void(running.id, "cancelled", "run_ended")

    def orphan(self, policy: str, checkpoint: int) -> None:
        """Versions of the policy after `checkpoint` died.

        Rounds asked for at such a version of the first policy are void; what of them is still open expires. Those
        that run go on with the version that lives of any other policy.
        """
        for running in self._running():
            versions = json.loads(running.versions)
            if versions.get(policy, 0) > checkpoint:
                lower = json.dumps(versions | {policy: checkpoint})
                self._read_at = -1
                self._db.run("UPDATE rounds SET versions = ? WHERE id = ?", (lower, running.id))
        if policy != self._rules.policy:
            return
        for number in self._db.column("SELECT id FROM rounds WHERE version > ? AND state != 'orphaned'", (checkpoint,)):
            self._void(number, "orphaned", "rolled_back")

    def _void(self, number: int, state: str, cause: str) -> None:
        """End a round that has no result; those of its groups that still play expire."""
        query = "SELECT id FROM groups WHERE lane = 'eval' AND round = ? AND state = 'playing'"
        for group in self._db.column(query, (number,)):
            self._groups.end(group, "expired", cause)
        self._read_at = -1
        self._db.run("UPDATE rounds SET state = ? WHERE id = ?", (state, number))
        self._release(number)

    def results(self) -> list[Evaluation]:
        """The latest results, in the order of their steps."""
        query = f"{_ROUND} WHERE state = 'ended' ORDER BY step DESC, id DESC LIMIT ?"
        return [
            Evaluation(
                version=ended.version,
                reward=math.nan if ended.reward is None else ended.reward,
                episodes=ended.episodes,
                failed=ended.failed,
                by_source=self._means(ended.id),
            )
            for ended in reversed(self._db.rows(Round, query, (_MOST_RESULTS,)))
        ]

    def _means(self, number: int) -> dict[str, float]:
        rows = self._db.all("SELECT source, reward FROM round_sources WHERE round = ? ORDER BY source", (number,))
        return {source: math.nan if reward is None else reward for source, reward in rows}


def _average(means: list[float | None]) -> float | None:
    """Return the mean of the sources' means; None if one of them is missing, since then it cannot be compared."""
    known = [mean for mean in means if mean is not None]
    return fmean(known) if len(known) == len(means) else None
