"""The lines of weights that live: which versions of each policy were committed, which died with their trainer.

Version numbers are never used twice. The versions of a live line rise, with gaps where others died: a version
inside one of the `orphans` ranges is dead for good, and every later version is above all of them. A number that the
line has passed over was published, perhaps, but never committed: it is dead, too.
"""

from __future__ import annotations

import msgspec

from rillflow.dataflow.part import Part
from rillflow.errors import BadRequest, ConfigError, LeaseLost
from rillflow.types import JoinTrainer, TrainerJoined
from rillflow.types.decoding import json_decoder


class Lineage(Part):
    def open(self) -> None:
        gone = [row["name"] for row in self._db.all("SELECT name FROM policies")]
        if gone := [name for name in gone if name not in self._rules.policies]:
            raise ConfigError(
                f"the run was started with policy {', '.join(gone)}, which the recipe no longer has",
                "restore the policies that the run was started with",
            )
        for policy in self._rules.policies:
            self._db.run(
                "INSERT OR IGNORE INTO policies (name, version, highest, steps) VALUES (?, 0, 0, 0)", (policy,)
            )

    def head(self, policy: str) -> int:
        """The version of the policy's trainer."""
        return int(self._db.value("SELECT version FROM policies WHERE name = ?", (policy,)))

    @property
    def heads(self) -> dict[str, int]:
        """The versions of all policies of the run, the first one's first."""
        found = {row["name"]: row["version"] for row in self._db.all("SELECT name, version FROM policies")}
        return {policy: found[policy] for policy in self._rules.policies}

    def highest(self, policy: str) -> int:
        return int(self._db.value("SELECT highest FROM policies WHERE name = ?", (policy,)))

    def steps(self, policy: str) -> int:
        """Optimizer steps committed on the live line."""
        return int(self._db.value("SELECT steps FROM policies WHERE name = ?", (policy,)))

    def done(self, policy: str) -> bool:
        """Whether the policy's trainer has done its steps, and takes nothing more."""
        return self.steps(policy) >= self._rules.policies[policy].total_steps

    def unfinished(self) -> list[str]:
        steps = {row["name"]: row["steps"] for row in self._db.all("SELECT name, steps FROM policies")}
        return [name for name, rules in self._rules.policies.items() if steps[name] < rules.total_steps]

    @property
    def deaths(self) -> bool:
        """Whether any version of any policy has died."""
        return bool(self._db.value("SELECT EXISTS (SELECT 1 FROM orphans)"))

    def died(self, policy: str, oldest: int, newest: int) -> bool:
        """Whether a version from `oldest` to `newest` is dead; a sample with tokens of both sides is, too."""
        return bool(
            self._db.value(
                "SELECT 1 FROM orphans WHERE policy = ? AND low < ? AND ? <= high LIMIT 1", (policy, newest, oldest)
            )
        )

    def check_policy(self, policy: str) -> None:
        if policy not in self._rules.policies:
            raise BadRequest(
                f"there is no policy {policy!r:.80}", f"this run trains {', '.join(map(repr, self._rules.policies))}"
            )

    def check_trainer(self, policy: str, incarnation: str) -> None:
        """Only the trainer that joined last may lease and commit."""
        self.check_policy(policy)
        current = self._db.value("SELECT incarnation FROM policies WHERE name = ?", (policy,))
        if current is None:
            raise LeaseLost(f"no trainer of {policy} has joined", "call /trainers/join first")
        if current != incarnation:
            raise LeaseLost(f"another trainer of {policy} has joined since", "end this one, or join again")

    # ------------------------------------------------------------ moving

    def move(self, policy: str, version: int, restorable: int) -> None:
        """A committed step: the policy stands at `version` now."""
        highest = self.highest(policy)
        if version <= highest:
            raise BadRequest(
                f"version {version} was used before: the highest is {highest}",
                "a trainer's next version is one above the highest ever published",
            )
        if not 0 <= restorable <= version:
            raise BadRequest(f"restorable is {restorable}, the version {version}", "name a checkpoint that is kept")
        self._bury(policy, self.head(policy), version - 1)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, restorable = ?, steps = steps + 1 WHERE name = ?",
            (version, version, restorable, policy),
        )

    def joined(self, ask: JoinTrainer) -> TrainerJoined | None:
        """The reply to the same join, when it has been answered before; a replaced trainer never comes back."""
        if self._db.value("SELECT 1 FROM former WHERE policy = ? AND incarnation = ?", (ask.policy, ask.incarnation)):
            raise LeaseLost(f"another trainer of {ask.policy} has joined since", "end this one")
        row = self._db.one("SELECT incarnation, joined FROM policies WHERE name = ?", (ask.policy,))
        if row is None or row["incarnation"] != ask.incarnation:
            return None
        return json_decoder(TrainerJoined).decode(row["joined"])

    def check_checkpoint(self, policy: str, checkpoint: int) -> None:
        if checkpoint != 0 and not self._db.value(
            "SELECT 1 FROM steps WHERE policy = ? AND version = ? AND state = 'live'", (policy, checkpoint)
        ):
            raise BadRequest(
                f"version {checkpoint} is not on the live line of {policy}, which ends at {self.head(policy)}",
                "restore the checkpoint of a committed version: a checkpoint is saved after its commit",
            )

    def rewind(self, policy: str, checkpoint: int, published: int) -> list[int]:
        """The policy stands at `checkpoint` again; returns the committed versions that died."""
        high = max(self.highest(policy), published)
        dead = self._db.all(
            "SELECT version FROM steps WHERE policy = ? AND state = 'live' AND version > ? ORDER BY version",
            (policy, checkpoint),
        )
        self._db.run("UPDATE steps SET state = 'orphaned' WHERE policy = ? AND version > ?", (policy, checkpoint))
        self._bury(policy, checkpoint, high)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, steps = steps - ? WHERE name = ?",
            (checkpoint, high, len(dead), policy),
        )
        return [row["version"] for row in dead]

    def _bury(self, policy: str, low: int, high: int) -> None:
        """Versions v with low < v <= high are dead from now on."""
        buried = self._db.value("SELECT max(high) FROM orphans WHERE policy = ? AND low <= ?", (policy, low))
        if high > max(low, buried or 0):
            self._db.run("INSERT INTO orphans VALUES (?, ?, ?)", (policy, low, high))

    def remember(self, ask: JoinTrainer, reply: TrainerJoined) -> None:
        """Whoever stood here before is a former trainer: a late copy of its join must take nothing back."""
        self._db.run(
            "INSERT OR IGNORE INTO former SELECT name, incarnation FROM policies "
            "WHERE name = ? AND incarnation IS NOT NULL",
            (ask.policy,),
        )
        self._db.run(
            "UPDATE policies SET incarnation = ?, joined = ? WHERE name = ?",
            (ask.incarnation, msgspec.json.encode(reply).decode(), ask.policy),
        )
