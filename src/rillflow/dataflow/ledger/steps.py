"""Steps: what a commit leaves, for people and for the balance between the sides. Writes no table itself."""

from __future__ import annotations

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.nodes import Nodes
from rillflow.dataflow.ledger.shares import ENTERED
from rillflow.dataflow.ledger.streams import SKIPPED_IN_A_ROW
from rillflow.dataflow.ledger.tables import StepRow
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import CommitBatch

_INTERNAL = ("cursor", "batches", "stage_batches", ENTERED, SKIPPED_IN_A_ROW)
_MEMBERS = "FROM members m JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0"


class Steps(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes

    def write(self, news: CommitBatch, parent: int) -> None:
        """Write the step's row and its line, and count the samples for the nodes that made them."""
        by_node = self._db.all(
            "SELECT t.node, count(*), sum(s.tokens), sum(m.head - s.oldest), max(m.head - s.oldest), sum(m.replayed) "
            f"{_MEMBERS} JOIN tasks t ON t.grp = s.grp AND t.place = s.place WHERE m.batch = ? GROUP BY t.node",
            (news.batch,),
        )
        for node, number, *_, again in by_node:
            if number > again:
                self._nodes.consumed(node, number - again)
        _, numbers, lengths, ages, oldest, repeats = zip(*by_node, strict=True)
        samples, tokens, most, replayed = sum(numbers), sum(lengths), max(oldest), sum(repeats)
        mean = sum(ages) / samples
        # The reward is that of all complete groups: filters make the batch alone unrepresentative.
        reward, flat = self._groups.take_recent(news.policy, news.batch)
        step = StepRow(samples, tokens, reward, mean, news.step_seconds, news.wait_seconds)
        self._lineage.add_step(news, parent, step)
        seconds = news.step_seconds + news.wait_seconds
        self._db.event(
            {
                **news.metrics,
                **self._groups.measured("SELECT grp FROM members WHERE batch = ?", news.batch),
                "policy": news.policy,
                "step": self._lineage.steps(news.policy),
                "version": news.version,
                "time": self._clock.now(),
                "reward": reward,
                "staleness_mean": mean,
                "staleness_max": most,
                "samples": samples,
                "replayed": replayed,
                "tokens": tokens,
                "samples_per_second": samples / seconds if seconds > 0 else 0.0,
                "wait_fraction": news.wait_seconds / seconds if seconds > 0 else 0.0,
                "zero_variance_fraction": flat,
                "counters": self.counters(),
            }
        )

    def counters(self) -> dict[str, int]:
        """Return the groups by state and cause, and everything else that is counted, by name.

        What waits for a trainer is counted under the first policy's stream, and with its name for every other.
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
