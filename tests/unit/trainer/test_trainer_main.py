"""A whole trainer process's work against a dataflow service imitated over real HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import random_samples, small_model

from rillflow.config import Recipe
from rillflow.errors import LeaseLost
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.main import run_trainer
from rillflow.trainer.stream import RemoteStream
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    CommitBatch,
    GetRows,
    JoinTrainer,
    LeaseBatch,
    RowsGot,
    TrainerJoined,
    UnitInfo,
)
from rillflow.weights import FolderStore
from rillflow.wire import LoopThread, Service

TOKEN = "t" * 32


class Peer(Service):
    """Serves `total` batches, then says that the run is finishing."""

    def __init__(self, total: int) -> None:
        super().__init__("dataflow", TOKEN)
        self.total = total
        self.commits: list[CommitBatch] = []
        self.accept = True
        self.on_commit: Callable[[CommitBatch], Awaitable[None]] | None = None
        self.rows = [random_samples(number) for number in range(total)]
        self.post("/trainers/join", self._join, JoinTrainer)
        self.post("/batches/lease", self._lease, LeaseBatch)
        self.post("/batches/commit", self._commit, CommitBatch)
        self.post("/unit/get", self._get, GetRows)
        self.get("/unit/info", self._info)

    async def _join(self, news: JoinTrainer) -> TrainerJoined:
        self.commits = [commit for commit in self.commits if commit.version <= news.checkpoint]
        return TrainerJoined(
            version=news.checkpoint, highest=news.checkpoint, steps=len(self.commits), orphaned=[], rolled_back=0
        )

    async def _lease(self, ask: LeaseBatch) -> BatchReply:
        number = len(self.commits)
        if number >= self.total:
            return BatchReply(batch=None, phase="finishing" if self.total else "training", waiting_for="samples")
        samples = self.rows[number][0]
        batch = Batch(
            id=str(number), attempt=ask.attempt, policy=ask.policy, version=ask.version, samples=samples, seconds=60
        )
        return BatchReply(batch=batch, phase="training")

    async def _commit(self, news: CommitBatch) -> Ack:
        if self.on_commit is not None:
            await self.on_commit(news)
        if self.accept:
            self.commits.append(news)
        return Ack(accepted=self.accept, reason="too late")

    async def _get(self, ask: GetRows) -> RowsGot:
        payload = self.rows[len(self.commits)][1]
        return RowsGot(rows=[{name: payload[row.offset][name].tobytes() for name in ask.columns} for row in ask.rows])

    async def _info(self) -> UnitInfo:
        return UnitInfo(unit="u", path="/nowhere")


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("peer")
    yield thread
    thread.close()


@pytest.fixture(autouse=True)
def _settings_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def recipe_for(tmp_path: Path, **trainer: Any) -> Recipe:
    small_model().save_pretrained(tmp_path / "model")
    return Recipe.model_validate(
        {
            "name": "unit",
            "workflow": "x:y",
            "data": {"prompts": {"path": "x"}},
            "dataflow": {"staleness": 0},
            "runtime": {"deterministic": True},
            "policies": {"p": {"model": str(tmp_path / "model"), "trainer": {"lr": 1e-2, **trainer}}},
        }
    )


def run(recipe: Recipe, folder: Path, peer: Peer, thread: LoopThread, **options: Any) -> None:
    url = thread.run(peer.start(), 10)
    try:
        run_trainer(recipe, "p", folder, url, TOKEN, **options)
    finally:
        thread.run(peer.stop(), 10)


def test_a_run_from_start_to_end(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(3)
    run(recipe_for(tmp_path), tmp_path, peer, thread)
    assert [commit.version for commit in peer.commits] == [1, 2, 3]
    assert peer.commits[0].metrics["trained_tokens"] > 0
    assert peer.commits[0].step_seconds > 0
    assert FolderStore(tmp_path / "weights" / "p").head() == 3
    assert Checkpoints(tmp_path / "checkpoints" / "p", 2).versions() == [3]


def page(url: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return str(response.read().decode())


def test_metrics_of_the_last_step_are_served(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(2)
    urls: list[str] = []
    pages: list[str] = []

    async def look(news: CommitBatch) -> None:
        pages.append(await asyncio.to_thread(page, urls[0] + "/metrics"))

    peer.on_commit = look
    run(recipe_for(tmp_path), tmp_path, peer, thread, on_ready=urls.append)
    assert "rillflow_trainer_version" not in pages[0]
    assert 'rillflow_trainer_version{policy="p"} 1.0' in pages[1]
    assert 'rillflow_trainer_grad_norm{policy="p"}' in pages[1]


def test_a_commit_that_came_too_late_ends_the_trainer(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(1)
    peer.accept = False
    with pytest.raises(LeaseLost, match="too late"):
        run(recipe_for(tmp_path), tmp_path, peer, thread)
    assert FolderStore(tmp_path / "weights" / "p").head() == 1


def test_sigterm_while_waiting_ends_soon_with_a_checkpoint(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(0)
    sent: list[float] = []

    def terminate() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(1.0, terminate)
    run(recipe_for(tmp_path), tmp_path, peer, thread, on_ready=lambda url: timer.start())
    assert time.monotonic() - sent[0] < 3.0
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_dataflow_service_may_be_away_for_a_while(tmp_path: Path, thread: LoopThread) -> None:
    """Leasing goes on after the service has come back on the same port."""
    peer = Peer(0)
    url = thread.run(peer.start(), 10)
    port = int(url.rsplit(":", 1)[1])
    again = Peer(2)

    def swap() -> None:
        thread.run(peer.stop(), 10)
        time.sleep(0.5)
        thread.run(again.start(port=port), 10)

    timer = threading.Timer(1.0, swap)
    timer.start()
    run_trainer(recipe_for(tmp_path), "p", tmp_path, url, TOKEN)
    timer.join()
    thread.run(again.stop(), 10)
    assert [commit.version for commit in again.commits] == [1, 2]


@pytest.mark.parametrize(("step", "hint"), [(1.0, "restarts by itself"), (61.0, "raise dataflow.batch_lease")])
def test_a_lease_that_was_too_short_is_named(thread: LoopThread, step: float, hint: str) -> None:
    class Late:
        async def commit(self, news: object) -> object:
            raise LeaseLost("batch b is expired", "join again")

    stream = RemoteStream(thread, Late(), None, policy="p", incarnation="i", groups=1)  # type: ignore[arg-type]
    batch = Batch(id="b", attempt="a", policy="p", version=0, samples=[], seconds=60.0)
    with pytest.raises(LeaseLost, match="expired") as caught:
        stream.commit(batch, 1, {}, step=step, wait=0.0)
    assert hint in caught.value.hint
