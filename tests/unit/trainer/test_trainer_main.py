"""A whole trainer process's work against a dataflow service imitated over real HTTP, and a real storage unit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dataflow_peer import TOKEN, Peer, recipe_for

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.config import Recipe, load_recipe
from rillflow.errors import LeaseLost
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.main import Access, _publishes_first, run_trainer
from rillflow.trainer.remote_stream import RemoteStream
from rillflow.trainer.stream import StepRecord
from rillflow.types import CommitBatch
from rillflow.weights import FolderStore
from rillflow.wire import Client, LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("peer")
    yield thread
    thread.close()


@pytest.fixture(autouse=True)
def _settings_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def run(recipe: Recipe, folder: Path, peer: Peer, thread: LoopThread, **options: Any) -> bool:
    url = thread.run(peer.start(), 10)
    try:
        return run_trainer(recipe, "p", folder, url, Access.of_run(TOKEN), **options)
    finally:
        thread.run(peer.stop(), 10)
        peer.unit.close()


def test_a_run_from_start_to_end(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 3)
    assert run(recipe_for(tmp_path), tmp_path, peer, thread)
    assert [commit.version for commit in peer.commits] == [1, 2, 3]
    assert peer.commits[0].metrics["trained_tokens"] > 0
    assert peer.commits[0].step_seconds > 0
    assert FolderStore(tmp_path / "weights" / "p").head() == 3
    assert Checkpoints(tmp_path / "checkpoints" / "p", 2).versions() == [3]


def page(url: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def test_metrics_of_the_last_step_are_served(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 2)
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
    peer = Peer(tmp_path, 1)
    peer.accept = False
    recipe = recipe_for(tmp_path)
    # Without this, nodes may not sample on before they have the new version: it is published first.
    recipe = recipe.model_copy(update={"dataflow": recipe.dataflow.model_copy(update={"staleness": 1})})
    with pytest.raises(LeaseLost, match="too late"):
        run(recipe, tmp_path, peer, thread)
    assert FolderStore(tmp_path / "weights" / "p").head() == 0  # an uncommitted version is not published


def test_sigterm_while_waiting_ends_soon_with_a_checkpoint(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 0)
    sent: list[float] = []

    def terminate() -> None:
        wait_until(lambda: bool(peer.leases))
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.1, terminate)
    finished = run(recipe_for(tmp_path), tmp_path, peer, thread, on_ready=lambda url: timer.start())
    assert not finished
    assert time.monotonic() - sent[0] < 30.0
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_dataflow_service_may_be_away_for_a_while(tmp_path: Path, thread: LoopThread) -> None:
    """Leasing goes on after the service has come back on the same port."""
    peer = Peer(tmp_path, 0)
    url = thread.run(peer.start(), 10)
    port = int(url.rsplit(":", 1)[1])
    again = Peer(tmp_path / "again", 2)

    def swap() -> None:
        thread.run(peer.stop(), 10)
        time.sleep(0.5)
        thread.run(again.start(port=port), 10)

    timer = threading.Timer(1.0, swap)
    timer.start()
    run_trainer(recipe_for(tmp_path), "p", tmp_path, url, Access.of_run(TOKEN))
    timer.join()
    thread.run(again.stop(), 10)
    for one in (peer, again):
        one.unit.close()
    assert [commit.version for commit in again.commits] == [1, 2]


def test_batches_may_come_in_parts(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 2)
    run(recipe_for(tmp_path, deterministic=False, stream_groups=2, batch_groups=3), tmp_path, peer, thread)
    assert [(ask.have, ask.least, ask.groups) for ask in peer.leases] == [(0, 2, 3), (2, 2, 3)] * 2 + [(0, 2, 3)]
    assert [commit.metrics["parts"] for commit in peer.commits] == [2, 2]
    assert [commit.metrics["samples"] for commit in peer.commits] == [12, 12]


def test_a_repeatable_run_takes_whole_batches(tmp_path: Path, thread: LoopThread) -> None:
    """Parts come as they are ready: another run would add them up in another order."""
    peer = Peer(tmp_path, 1)
    run(recipe_for(tmp_path, stream_groups=2), tmp_path, peer, thread)
    assert {ask.least for ask in peer.leases} == {0}


def test_damaged_rows_are_reported_and_others_trained_on(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 2)
    rows = [sample.row for sample in peer.samples[1][4:6]]
    path = next((tmp_path / "units" / "unit-0").glob(f"*{rows[0].segment}*"))
    data = bytearray(path.read_bytes())
    for row in rows:
        data[row.offset + row.length // 2] ^= 1
    path.write_bytes(data)
    run(recipe_for(tmp_path), tmp_path, peer, thread)
    assert [news.rows for news in peer.lost] == [rows]
    assert [commit.version for commit in peer.commits] == [1, 2]


def test_rows_that_do_not_fit_their_samples_are_reported_too(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 1)
    wrong = peer.samples[0][3]
    peer.samples[0][3] = msgspec.structs.replace(wrong, tokens=wrong.tokens + 1)
    run(recipe_for(tmp_path), tmp_path, peer, thread)
    assert [news.rows for news in peer.lost] == [[wrong.row]]
    assert "another length" in peer.lost[0].reason
    assert len(peer.commits) == 1


def test_the_batch_in_hand_is_renewed_and_no_other(tmp_path: Path, thread: LoopThread) -> None:
    peer = Peer(tmp_path, 2)
    peer.lease = 0.2
    url = thread.run(peer.start(), 10)
    own = LoopThread("trainer-wire")
    dataflow = DataflowClient(Client(url, TOKEN))
    stream = RemoteStream(own, dataflow, PayloadReader(dataflow.units, TOKEN), policy="p", incarnation="i", groups=3)
    try:
        batch = stream.lease(0, "a", 0.0, 0).batch
        assert batch is not None
        wait_until(lambda: len(peer.renewed) >= 6)
        assert {(news.batch, news.attempt) for news in peer.renewed} == {("0", "a")}
        stream.commit(StepRecord(batch, 1, {}, 0.1, 0.1, 0))
        done = len(peer.renewed)
        assert stream.lease(1, "b", 0.0, 0).batch is not None
        wait_until(lambda: len(peer.renewed) >= done + 2)
        assert {news.attempt for news in peer.renewed[done:]} == {"b"}
        stream.abandon()
        stream.check()
    finally:
        own.run(dataflow.close(), 10)
        own.close()
        thread.run(peer.stop(), 10)
        peer.unit.close()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "waited 60 s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ([], False),
        (["data.epochs=1"], True),
        (["dataflow.staleness=0"], True),
        (["evaluation.every=2", "evaluation.target=0.9"], True),
    ],
)
def test_a_version_is_published_before_a_commit_that_may_end_the_run(changes: list[str], first: bool) -> None:
    assert _publishes_first(load_recipe("stockroom", changes), "agent", None) == first
