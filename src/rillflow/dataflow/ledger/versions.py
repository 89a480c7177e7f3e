"""The lines of weights that live: which versions of each policy were committed, which died with their trainer.

Version numbers are never used twice. The versions of a live line rise, with gaps where others died: a version inside
one of the `orphans` ranges stays dead, and every later version is above all of them. A number that the line has
passed over was published, perhaps, but never committed: it is dead, too.

The only writer of policies, former, orphans and steps.
"""

from __future__ import annotations

import json

import msgspec

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.tables import Policy, StepRow
from rillflow.errors import BadRequest, ConfigError, LeaseLost
from rillflow.types import CommitBatch, JoinTrainer, TrainerJoined
from rillflow.types.base import json_decoder


class Lineage(Part):
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        # The rows of `policies` and `orphans`, as long as nothing was taken back and none was changed.
        self._known: dict[str, Policy] = {}
        self._dead: list[tuple[str, int, int]] = []
        self._read_at = -1

    def open(self) -> None:
        gone = [name for name in self._db.column("SELECT name FROM policies") if name not in self._rules.policies]
        if gone:
            raise ConfigError(
                f"the run was started with policy {', '.join(gone)}, which the recipe no longer has",
                "restore the policies that the run was started with",
            )
        self._db.many(
            "INSERT OR IGNORE INTO policies (name, version, highest, steps) VALUES (?, 0, 0, 0)",
            [(policy,) for policy in self._rules.policies],
        )

    # ------------------------------------------------------------ looking

    def policies(self) -> dict[str, Policy]:
        """Return the rows of all policies, the first one's first. They are read again when one has changed."""
        if self._read_at != self._db.rollbacks:
            found = self._db.rows(Policy, f"SELECT {Policy.columns()} FROM policies")
            known = {policy.name: policy for policy in found}
            self._known = {name: known[name] for name in self._rules.policies}
            self._dead = [(policy, low, high) for policy, low, high in self._db.all("SELECT * FROM orphans")]
            self._read_at = self._db.rollbacks
        return self._known

    def head(self, policy: str) -> int:
        """Return the version of the policy's trainer."""
        return self.policies()[policy].version

    @property
    def heads(self) -> dict[str, int]:
        """The versions of all policies of the run, the first one's first."""
        return {name: policy.version for name, policy in self.policies().items()}

    def highest(self, policy: str) -> int:
        return self.policies()[policy].highest

    def steps(self, policy: str) -> int:
        """Return the number of optimizer steps committed on the live line."""
        return self.policies()[policy].steps

    def done(self, policy: str) -> bool:
        """Return whether the policy's trainer has done its steps, and takes nothing more."""
        return self.steps(policy) >= self._rules.policies[policy].total_steps

    def unfinished(self) -> list[str]:
        return [name for name in self.policies() if not self.done(name)]

    @property
    def deaths(self) -> bool:
        """True if any version of any policy has died."""
        self.policies()
        return bool(self._dead)

    def died(self, policy: str, oldest: int, newest: int) -> bool:
        """Return whether a version from `oldest` to `newest` is dead; a sample with tokens of both sides is, too."""
        self.policies()
        return any(of == policy and low < newest and oldest <= high for of, low, high in self._dead)

    def live_steps(self, policy: str, most: int) -> list[StepRow]:
        """Return the policy's last live steps, newest first."""
        query = (
            f"SELECT {StepRow.columns()} FROM steps WHERE policy = ? AND state = 'live' ORDER BY version DESC LIMIT ?"
        )
        return self._db.rows(StepRow, query, (policy, most))

    def check_policy(self, policy: str) -> None:
        if policy not in self._rules.policies:
            raise self.unknown_policy(policy)

    def unknown_policy(self, policy: str) -> BadRequest:
        known = ", ".join(map(repr, self._rules.policies))
        return BadRequest(f"there is no policy {policy!r:.80}", f"this run trains {known}")

    def check_trainer(self, policy: str, incarnation: str) -> None:
        """Refuse every trainer but the one that joined last."""
        self.check_policy(policy)
        current = self.policies()[policy].incarnation
        if current is None:
            raise LeaseLost(f"no trainer of {policy} has joined", "call /trainers/join first")
        if current != incarnation:
            raise LeaseLost(f"another trainer of {policy} has joined since", "end this one, or join again")

    # ------------------------------------------------------------ a step

    def check_next(self, policy: str, version: int, restorable: int) -> None:
        highest = self.highest(policy)
        if version <= highest:
            raise BadRequest(
                f"version {version} was used before: the highest is {highest}",
                "a trainer's next version is one above the highest ever published",
            )
        if not 0 <= restorable <= version:
            raise BadRequest(f"restorable is {restorable}, the version {version}", "name a checkpoint that is kept")

    def move(self, policy: str, version: int, restorable: int) -> None:
        """Move the policy to `version`, which a committed step has made."""
        self.check_next(policy, version, restorable)
        self._mark_dead(policy, self.head(policy), version - 1)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, restorable = ?, steps = steps + 1 WHERE name = ?",
            (version, version, restorable, policy),
        )
        self._read_at = -1

    def add_step(self, news: CommitBatch, parent: int, step: StepRow) -> None:
        """Write down what the step was that made the version."""
        self._db.run(
            "INSERT INTO steps (policy, version, parent, batch, samples, tokens, reward, staleness, step_seconds, "
            "wait_seconds, metrics, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(news.policy, news.version, parent, news.batch, step.samples, step.tokens, step.reward),
                *(step.staleness, step.step_seconds, step.wait_seconds, json.dumps(news.metrics), self._clock.now()),
            ),
        )

    # ------------------------------------------------------------ a new trainer

    def joined(self, ask: JoinTrainer) -> TrainerJoined | None:
        """Return the reply to the same join, when it has been answered before; a replaced trainer never comes back."""
        if self._db.value("SELECT 1 FROM former WHERE policy = ? AND incarnation = ?", (ask.policy, ask.incarnation)):
            raise LeaseLost(f"another trainer of {ask.policy} has joined since", "end this one")
        query = "SELECT joined FROM policies WHERE name = ? AND incarnation = ?"
        reply = self._db.value(query, (ask.policy, ask.incarnation))
        return None if reply is None else json_decoder(TrainerJoined).decode(reply)

    def check_checkpoint(self, policy: str, checkpoint: int) -> None:
        query = "SELECT 1 FROM steps WHERE policy = ? AND version = ? AND state = 'live'"
        if checkpoint != 0 and not self._db.value(query, (policy, checkpoint)):
            raise BadRequest(
                f"version {checkpoint} is not on the live line of {policy}, which ends at {self.head(policy)}",
                "restore the checkpoint of a committed version: a checkpoint is saved after its commit",
            )

    def rewind(self, policy: str, checkpoint: int, published: int) -> list[int]:
        """Move the policy back to `checkpoint`; returns the committed versions that died."""
        high = max(self.highest(policy), published)
        dead = self._db.column(
            "SELECT version FROM steps WHERE policy = ? AND state = 'live' AND version > ? ORDER BY version",
            (policy, checkpoint),
        )
        self._db.run("UPDATE steps SET state = 'orphaned' WHERE policy = ? AND version > ?", (policy, checkpoint))
        self._mark_dead(policy, checkpoint, high)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, steps = steps - ? WHERE name = ?",
            (checkpoint, high, len(dead), policy),
        )
        self._read_at = -1
        return dead

    def _mark_dead(self, policy: str, low: int, high: int) -> None:
        """Mark the versions v with low < v <= high as dead."""
        known = self._db.value("SELECT max(high) FROM orphans WHERE policy = ? AND low <= ?", (policy, low))
        if high > max(low, known or 0):
            self._db.run("INSERT INTO orphans VALUES (?, ?, ?)", (policy, low, high))

    def remember(self, ask: JoinTrainer, reply: TrainerJoined) -> None:
        """Make the asker the policy's trainer. A late copy of the former one's join must take nothing back."""
        self._db.run(
            "INSERT OR IGNORE INTO former SELECT name, incarnation FROM policies "
            "WHERE name = ? AND incarnation IS NOT NULL",
            (ask.policy,),
        )
        self._db.run(
            "UPDATE policies SET incarnation = ?, joined = ? WHERE name = ?",
            (ask.incarnation, msgspec.json.encode(reply).decode(), ask.policy),
        )
        self._read_at = -1
