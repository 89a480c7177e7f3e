"""The line of weights that lives: which versions were committed, which died with their trainer.

Version numbers are never used twice. The versions of the live line rise, with gaps where others died: a version
inside one of the `orphans` ranges is dead for good, and every later version is above all of them. A number that the
line has passed over was published, perhaps, but never committed: it is dead, too.
"""

from __future__ import annotations

import msgspec

from rillflow.dataflow.part import Part
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import JoinTrainer, TrainerJoined


class Lineage(Part):
    def open(self) -> None:
        self._db.run("INSERT OR IGNORE INTO policies VALUES (?, 0, 0, 0, NULL, NULL)", (self._rules.policy,))

    @property
    def head(self) -> int:
        """The trainer's version."""
        return int(self._db.value("SELECT version FROM policies WHERE name = ?", (self._rules.policy,)))

    @property
    def highest(self) -> int:
        return int(self._db.value("SELECT highest FROM policies WHERE name = ?", (self._rules.policy,)))

    @property
    def steps(self) -> int:
        """Optimizer steps committed on the live line."""
        return int(self._db.value("SELECT steps FROM policies WHERE name = ?", (self._rules.policy,)))

    def died(self, oldest: int, newest: int) -> bool:
        """Whether a version from `oldest` to `newest` is dead; a sample with tokens of both sides is, too."""
        return bool(
            self._db.value(
                "SELECT 1 FROM orphans WHERE policy = ? AND low < ? AND ? <= high LIMIT 1",
                (self._rules.policy, newest, oldest),
            )
        )

    def check_policy(self, policy: str) -> None:
        if policy != self._rules.policy:
            raise BadRequest(f"there is no policy {policy!r:.80}", f"this run trains {self._rules.policy!r}")

    def check_trainer(self, policy: str, incarnation: str) -> None:
        """Only the trainer that joined last may lease and commit."""
        self.check_policy(policy)
        current = self._db.value("SELECT incarnation FROM policies WHERE name = ?", (policy,))
        if current is None:
            raise LeaseLost(f"no trainer of {policy} has joined", "call /trainers/join first")
        if current != incarnation:
            raise LeaseLost(f"another trainer of {policy} has joined since", "end this one, or join again")

    # ------------------------------------------------------------ moving

    def move(self, version: int) -> None:
        """A committed step: the policy stands at `version` now."""
        if version <= self.highest:
            raise BadRequest(
                f"version {version} was used before: the highest is {self.highest}",
                "a trainer's next version is one above the highest ever published",
            )
        self._bury(self.head, version - 1)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, steps = steps + 1 WHERE name = ?",
            (version, version, self._rules.policy),
        )

    def joined(self, ask: JoinTrainer) -> TrainerJoined | None:
        """The reply to the same join, when it has been answered before; a replaced trainer never comes back."""
        if self._db.value("SELECT 1 FROM former WHERE policy = ? AND incarnation = ?", (ask.policy, ask.incarnation)):
            raise LeaseLost(f"another trainer of {ask.policy} has joined since", "end this one")
        row = self._db.one("SELECT incarnation, joined FROM policies WHERE name = ?", (ask.policy,))
        if row is None or row["incarnation"] != ask.incarnation:
            return None
        return msgspec.json.decode(row["joined"], type=TrainerJoined)

    def check_checkpoint(self, checkpoint: int) -> None:
        if checkpoint != 0 and not self._db.value(
            "SELECT 1 FROM steps WHERE policy = ? AND version = ? AND state = 'live'",
            (self._rules.policy, checkpoint),
        ):
            raise BadRequest(
                f"version {checkpoint} is not on the live line of {self._rules.policy}, which ends at {self.head}",
                "restore the checkpoint of a committed version: a checkpoint is saved after its commit",
            )

    def rewind(self, checkpoint: int, published: int) -> list[int]:
        """The policy stands at `checkpoint` again; returns the committed versions that died."""
        policy = self._rules.policy
        high = max(self.highest, published)
        dead = self._db.all(
            "SELECT version FROM steps WHERE policy = ? AND state = 'live' AND version > ? ORDER BY version",
            (policy, checkpoint),
        )
        self._db.run("UPDATE steps SET state = 'orphaned' WHERE policy = ? AND version > ?", (policy, checkpoint))
        self._bury(checkpoint, high)
        self._db.run(
            "UPDATE policies SET version = ?, highest = ?, steps = steps - ? WHERE name = ?",
            (checkpoint, high, len(dead), policy),
        )
        return [row["version"] for row in dead]

    def _bury(self, low: int, high: int) -> None:
        """Versions v with low < v <= high are dead from now on."""
        policy = self._rules.policy
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
