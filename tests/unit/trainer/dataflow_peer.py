"""A dataflow service imitated over real HTTP, with a real storage unit, for a trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from trainer_helpers import random_samples, small_model

from rillflow.config import Recipe
from rillflow.dataflow.ledger.serving import partition
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    BatchSample,
    CommitBatch,
    JoinTrainer,
    LeaseBatch,
    LoseRows,
    RenewBatch,
    TrainerJoined,
    Units,
)
from rillflow.types.routes import Dataflow
from rillflow.wire import Service

TOKEN = "t" * 32
DIFFERENT = 40  # batches, after which they come again


class Peer(Service):
    """Serves `total` batches of three groups, then says that the run is finishing. `lease` is that of a batch."""

    def __init__(self, folder: Path, total: int, token: str = TOKEN) -> None:
        super().__init__("dataflow", token)
        self.total = total
        self.lease = 60.0
        self.commits: list[CommitBatch] = []
        self.renewed: list[RenewBatch] = []
        self.lost: list[LoseRows] = []
        self.leases: list[LeaseBatch] = []
        self.accept = True
        self.on_commit: Callable[[CommitBatch], Awaitable[None]] | None = None
        self.unit = FileUnit(folder / "units" / "unit-0")
        self.samples = [self._stored(number) for number in range(min(total, DIFFERENT))]
        self.on(Dataflow.join, self._join)
        self.on(Dataflow.lease_batch, self._lease)
        self.on(Dataflow.renew_batch, self._renew)
        self.on(Dataflow.commit, self._commit)
        self.on(Dataflow.lose_rows, self._lose)
        self.on(Dataflow.units, self._units)

    def _stored(self, number: int) -> list[BatchSample]:
        """Its samples, whose columns lie in two rows each, as those of stages do."""
        samples, payload = random_samples(number)
        rows = self.unit.put(
            [{name: row[name] for name in ("tokens", "mask", "temperatures", "versions")} for row in payload]
        )
        extra = self.unit.put([{name: row[name] for name in ("logprobs", "raw_logprobs")} for row in payload])
        return [
            msgspec.structs.replace(sample, row=row, extra=[more], member=int(sample.group[1:]))
            for sample, row, more in zip(samples, rows, extra, strict=True)
        ]

    async def _join(self, news: JoinTrainer) -> TrainerJoined:
        self.commits = [commit for commit in self.commits if commit.version <= news.checkpoint]
        return TrainerJoined(
            version=news.checkpoint, highest=news.checkpoint, steps=len(self.commits), orphaned=[], rolled_back=0
        )

    async def _lease(self, ask: LeaseBatch) -> BatchReply:
        self.leases.append(ask)
        number = len(self.commits)
        if number >= self.total:
            return BatchReply(batch=None, phase="finishing" if self.total else "training", waiting_for="samples")
        groups = min(ask.have + ask.least, 3) if ask.least else 3
        samples = self.samples[number % DIFFERENT]
        owners = partition([sample.tokens for sample in samples], ask.ranks)
        batch = Batch(
            id=str(number), attempt=ask.attempt, policy=ask.policy, version=ask.version, seconds=self.lease,
            samples=[
                sample
                for sample, owner in zip(samples, owners, strict=True)
                if owner == ask.rank and ask.have <= sample.member < groups
            ],
            groups=groups, complete=groups == 3,
        )  # fmt: skip
        return BatchReply(batch=batch, phase="training")

    async def _renew(self, news: RenewBatch) -> Ack:
        self.renewed.append(news)
        return Ack(accepted=True)

    async def _commit(self, news: CommitBatch) -> Ack:
        if self.on_commit is not None:
            await self.on_commit(news)
        if self.accept:
            self.commits.append(news)
        return Ack(accepted=self.accept, reason="too late")

    async def _lose(self, news: LoseRows) -> Ack:
        """The episodes are played again, which gives other rows."""
        self.lost.append(news)
        number = len(self.commits) % DIFFERENT
        self.samples[number] = self._stored(number)
        return Ack(accepted=True)

    async def _units(self) -> Units:
        return Units(units=[self.unit.info()])


def recipe_for(
    tmp_path: Path, *, deterministic: bool = True, policy: dict[str, Any] | None = None, **trainer: Any
) -> Recipe:
    small_model().save_pretrained(tmp_path / "model")
    return Recipe.model_validate(
        {
            "name": "unit",
            "workflow": "x:y",
            "data": {"prompts": {"path": "x"}},
            "dataflow": {"staleness": 0},
            "runtime": {"deterministic": deterministic},
            "policies": {"p": {"model": str(tmp_path / "model"), "trainer": {"lr": 1e-2, **trainer}} | (policy or {})},
        }
    )
