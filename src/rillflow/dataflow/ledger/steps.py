"""Steps: the row and the line of metrics of a committed step. Writes no table itself: `versions` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.nodes import Nodes
from rillflow.dataflow.ledger.shares import ENTERED
from rillflow.dataflow.ledger.streams import ELSEWHERE, SKIPPED_IN_A_ROW
from rillflow.dataflow.ledger.tables import StepRow
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import CommitBatch, StepPart

_INTERNAL = ("cursor", "batches", "stage_batches", ENTERED, ELSEWHERE, SKIPPED_IN_A_ROW)
_LAST_PART = "last_part"
_MEMBERS = "FROM members m JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0"


class Steps(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes

    def write(self, news: CommitBatch, batch: str, parent: int) -> None:
        """Write the step's row and its line, and count the samples for the nodes that made them. The first of several
        ledgers gets the `parts` of the others, and writes down the whole step."""
        own = self._part(news.policy, batch)
        if self._rules.ledger:
            self._db.set_meta(_LAST_PART, {"version": news.version, "part": msgspec.to_builtins(own)})
        whole = joined([own, *news.parts])
        step = StepRow(whole.samples, whole.tokens, whole.reward, whole.staleness, news.step_seconds, news.wait_seconds)
        self._lineage.add_step(replace(news, batch=batch), parent, step)
        seconds = news.step_seconds + news.wait_seconds
        self._db.event(
            {
                **news.metrics,
                **whole.measured,
                "policy": news.policy,
                "step": self._lineage.steps(news.policy),
                "version": news.version,
                "time": self._clock.now(),
                "reward": whole.reward,
                "staleness_mean": whole.staleness,
                "staleness_max": whole.stalest,
                "samples": whole.samples,
                "replayed": whole.replayed,
                "tokens": whole.tokens,
                "samples_per_second": whole.samples / seconds if seconds > 0 else 0.0,
                "wait_fraction": news.wait_seconds / seconds if seconds > 0 else 0.0,
                "zero_variance_fraction": whole.flat,
                "counters": whole.counters,
            }
        )

    def _part(self, policy: str, batch: str) -> StepPart:
        """Return what this ledger gave to a step: nothing, if the batch is empty."""
        by_node = self._db.all(
            "SELECT t.node, count(*), sum(s.tokens), sum(m.head - s.oldest), max(m.head - s.oldest), sum(m.replayed) "
            f"{_MEMBERS} JOIN tasks t ON t.grp = s.grp AND t.place = s.place WHERE m.batch = ? GROUP BY t.node",
            (batch,),
        )
        for node, number, *_, again in by_node:
            if number > again:
                self._nodes.consumed(node, number - again)
        samples, ages = sum(row[1] for row in by_node), sum(row[3] for row in by_node)
        groups = int(self._db.value("SELECT count(*) FROM members WHERE batch = ?", (batch,)))
        played = int(self._db.value("SELECT count(*) FROM recent WHERE stream = ?", (policy,))) or groups
        # The reward is that of all complete groups: filters make the batch alone unrepresentative.
        reward, flat = self._groups.take_recent(policy, batch)
        return StepPart(
            groups=groups,
            samples=samples,
            tokens=sum(row[2] for row in by_node),
            played=played,
            reward=reward or 0.0,
            flat=flat or 0.0,
            staleness=ages / samples if samples else 0.0,
            stalest=max((row[4] for row in by_node), default=0),
            replayed=sum(row[5] for row in by_node),
            measured=self._groups.measured("SELECT grp FROM members WHERE batch = ?", batch),
            counters=self.counters(),
        )

    def told(self, version: int) -> StepPart | None:
        """Return what this ledger, which is not the first, gave to the step of `version`, its last one."""
        last = self._db.meta(_LAST_PART, {})
        return msgspec.convert(last["part"], StepPart) if last.get("version") == version else None

    def counters(self) -> dict[str, int]:
        """Return the groups by state and cause, and everything else that is counted, by name.

        Shares that wait for a trainer are counted for the first policy's stream, and with its name for every other.
        """
        counts: dict[str, int] = {}
        self._db.write_totals()
        for lane, state, cause, n in self._db.all("SELECT lane, state, cause, n FROM tally WHERE state != 'open'"):
            name = state if lane == "train" else f"eval.{state}"
            counts[name] = counts.get(name, 0) + n
            if cause:
                counts[f"{name}.{cause}"] = n
        for stream, state, n in self._db.all("SELECT stream, state, sum(n) FROM share_tally GROUP BY stream, state"):
            if stream != self._rules.policy:
                counts[f"{stream}.{state}"] = n
            elif state in ("ready", "leased"):
                counts[state] = n
        marks = ",".join("?" * len(_INTERNAL))
        others = self._db.all(f"SELECT name, value FROM counters WHERE name NOT IN ({marks})", _INTERNAL)
        renamed = {"admitted.train": "admitted", "admitted.eval": "eval.admitted"}
        return counts | {renamed.get(name, name): value for name, value in others}


def joined(parts: Sequence[StepPart]) -> StepPart:
    """Return what all ledgers together gave to a step."""
    if len(parts) == 1:
        return parts[0]
    names = {name for part in parts for name in part.measured}
    return StepPart(
        groups=sum(part.groups for part in parts),
        samples=sum(part.samples for part in parts),
        tokens=sum(part.tokens for part in parts),
        played=sum(part.played for part in parts),
        reward=_mean([(part.reward, part.played) for part in parts]),
        flat=_mean([(part.flat, part.played) for part in parts]),
        staleness=_mean([(part.staleness, part.samples) for part in parts]),
        stalest=max(part.stalest for part in parts),
        replayed=sum(part.replayed for part in parts),
        measured={
            name: _mean([(part.measured[name], part.groups) for part in parts if name in part.measured])
            for name in sorted(names)
        },
        counters=dict(sum((Counter(part.counters) for part in parts), Counter())),
    )


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Return the mean of values with their weights."""
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else 0.0
