"""The loop on several ranks: the same decisions everywhere, one voice to the ledger, one writer of weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from loop_world import Ledger, NotedCheckpoints, NotedStore, Unigram, same, start
from thread_peers import ThreadPeers, in_ranks
from trainer_helpers import VOCAB

from rillflow.config import TrainerConfig
from rillflow.errors import DiskFull, LeaseLost, RunError
from rillflow.trainer.batches import Rows
from rillflow.trainer.loop import TrainerLoop
from rillflow.trainer.parallel import Stopped, share
from rillflow.trainer.parallel.sharding import Shards
from rillflow.types import Batch, BatchReply, KeptTokens, TrainerJoined
from rillflow.weights import FolderStore
from rillflow.weights.codec import tensor_facts
from rillflow.weights.delta_file import Part


class RankLedger:
    """All ranks hear what rank 0 leases; each reads for itself."""

    def __init__(self, ledger: Ledger, peers: ThreadPeers) -> None:
        self._ledger = ledger
        self._peers = peers

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        assert self._peers.rank == 0
        return self._ledger.join(checkpoint, published)

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        said = b""
        if self._peers.rank == 0:
            said = msgspec.msgpack.encode(self._ledger.lease(version, attempt, wait, have))
        return msgspec.msgpack.decode(self._peers.first(said), type=BatchReply)

    def read(self, part: Batch) -> Rows:
        return Ledger(0).read(part)

    def check(self) -> None: ...

    def abandon(self) -> None: ...

    def commit(self, *arguments: Any, **options: Any) -> None:
        assert self._peers.rank == 0
        self._ledger.commit(*arguments, **options)


def start_ranks(folder: Path, ledger: Ledger, ranks: int, **options: Any) -> list[Unigram]:
    def work(peers: ThreadPeers) -> Unigram:
        worker = Unigram(seed=peers.rank)  # the restored weights must not depend on a rank's initial ones
        if not Path(folder / "c").exists():
            worker = Unigram()
        TrainerLoop(
            RankLedger(ledger, peers), worker, NotedStore(folder / "w", ledger),
            NotedCheckpoints(folder / "c", ledger, peers), TrainerConfig(checkpoint_every=2, batch_wait=5.0),
            peers=peers, **options,
        ).run()  # fmt: skip
        return worker

    return in_ranks(ranks, work)


def test_a_run_on_two_ranks_goes_on_with_four_and_ends_on_one(tmp_path: Path) -> None:
    ledger = Ledger(3)
    start_ranks(tmp_path, ledger, 2)
    assert ledger.of("join", "commit") == ["join 0", "commit b0 1", "commit b1 2", "commit b2 3"]
    assert sum("rank" in name for name in os.listdir(tmp_path / "c" / "c00000003")) == 4
    ledger.batches = 6
    assert same(*start_ranks(tmp_path, ledger, 4)[::3])
    ledger.batches = 8
    trained = start(tmp_path, ledger)
    assert [version for _, version in ledger.live] == list(range(1, 9))
    assert same(trained, start(tmp_path / "straight", Ledger(8)))
    assert torch.equal(FolderStore(tmp_path / "w").pull(8)["embed"], trained.masters()["embed"])


def test_what_all_ranks_tell_of_kept_episodes_is_committed(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> None:
        worker = Unigram()
        told = KeptTokens(member=peers.rank, place=0, number=0, at=b"", advantages=b"", logprobs=b"")
        worker.kept = [told] * peers.rank
        TrainerLoop(
            RankLedger(ledger, peers), worker, NotedStore(tmp_path / "w", ledger),
            NotedCheckpoints(tmp_path / "c", ledger, peers), TrainerConfig(batch_wait=5.0), peers=peers,
        ).run()  # fmt: skip

    ledger = Ledger(1)
    in_ranks(3, work)
    assert [[one.member for one in kept] for kept in ledger.kept] == [[1, 2, 2]]


class Sharded(Unigram):
    """Rank r publishes its own rows of the embedding, rank 0 all that is small."""

    def __init__(self, peers: ThreadPeers) -> None:
        super().__init__()
        self.peers = peers

    def shards(self, dtype: torch.dtype) -> Shards:
        weights = self.weights(dtype)
        del weights["head"]
        first, last = share(VOCAB, self.peers.rank, self.peers.size)
        parts = {Part("embed", 3 * first, 3 * (last - first)): weights["embed"][first:last].clone()}
        if self.peers.rank == 0:
            parts |= {Part(name, 0, weights[name].numel()): weights[name].clone() for name in ("out", "scale")}
        return Shards(parts, {name: tensor_facts(t) for name, t in weights.items()}, {"head": "embed"})


@pytest.mark.parametrize("first", [True, False])
def test_ranks_publish_their_shards_together(tmp_path: Path, first: bool) -> None:
    """A version is published before it is committed, or after."""
    ledger = Ledger(5)

    def work(peers: ThreadPeers) -> Unigram:
        worker = Sharded(peers)
        TrainerLoop(
            RankLedger(ledger, peers), worker, FolderStore(tmp_path / "w", fingerprints=True),
            NotedCheckpoints(tmp_path / "c", ledger, peers),
            TrainerConfig(checkpoint_every=2, batch_wait=5.0), peers=peers, by_shards=True, publish_first=first,
        ).run()  # fmt: skip
        return worker

    for batches in (5, 8):  # the second time after a restart
        ledger.batches = batches
        worker = in_ranks(2, work)[0]
        store = FolderStore(tmp_path / "w")
        assert store.head() == batches
        assert all(torch.equal(store.pull(batches)[name], t) for name, t in worker.weights(torch.float32).items())
    kinds = {version: (entry.delta_bytes > 0, entry.full_bytes > 0) for version, entry in store.line().entries.items()}
    assert kinds[7] == kinds[8] == (True, False)
    assert kinds[6] == (False, True), "after a restart there is nothing to begin with"


@pytest.mark.parametrize("lost", ["damaged", "removed", "whole mode"])
def test_ranks_write_a_lost_version_again_together(tmp_path: Path, lost: str) -> None:
    ledger, fingerprints = Ledger(5), lost != "whole mode"

    def work(peers: ThreadPeers) -> Unigram:
        worker = Sharded(peers)
        TrainerLoop(
            RankLedger(ledger, peers), worker, FolderStore(tmp_path / "w", fingerprints=fingerprints),
            NotedCheckpoints(tmp_path / "c", ledger, peers),
            TrainerConfig(checkpoint_every=5, batch_wait=5.0), peers=peers, by_shards=True,
        ).run()  # fmt: skip
        return worker

    expected = in_ranks(2, work)[0].weights(torch.float32)
    store = FolderStore(tmp_path / "w")
    assert all(bool(entry.full_bytes) is not fingerprints for entry in list(store.line().entries.values())[1:])
    if lost == "removed":
        shutil.rmtree(store.path(5))
    else:
        next(path for path in store.path(5).iterdir() if path.suffix != ".json").write_bytes(b"nothing")
    before = store.manifest(4)
    in_ranks(2, work)
    assert store.manifest(5).full_files
    assert store.manifest(4) == before
    assert all(torch.equal(store.pull(5)[name], tensor) for name, tensor in expected.items())
    ledger.batches = 6
    worker = in_ranks(2, work)[0]
    assert all(torch.equal(store.pull(6)[name], t) for name, t in worker.weights(torch.float32).items())


def test_a_commit_that_is_refused_ends_all_ranks(tmp_path: Path) -> None:
    ledger = Ledger(3, refuse={"b1"})
    with pytest.raises(LeaseLost):
        start_ranks(tmp_path, ledger, 3)
    assert FolderStore(tmp_path / "w").head() == 1


def test_ranks_that_stop_because_one_was_asked_to_have_not_finished(tmp_path: Path) -> None:
    """This process was not asked to stop: its stream reports it."""
    ledger = Ledger(3)
    ledger.checking = [None] * 8 + [Stopped()]
    store, checkpoints = NotedStore(tmp_path / "w", ledger), NotedCheckpoints(tmp_path / "c", ledger)
    config = TrainerConfig(checkpoint_every=2, batch_wait=5.0)
    assert not TrainerLoop(ledger, Unigram(), store, checkpoints, config).run()
    assert checkpoints.versions() == [version for _, version in ledger.live[-1:]]
    assert TrainerLoop(ledger, Unigram(), store, checkpoints, config).run()


def test_what_is_wrong_at_the_start_ends_all_ranks(tmp_path: Path) -> None:
    ledger = Ledger(1)
    join = ledger.join
    ledger.join = lambda checkpoint, published: join(checkpoint + 3, published)  # type: ignore[method-assign]
    with pytest.raises((RunError, LeaseLost)):
        start_ranks(tmp_path, ledger, 2)
    assert ledger.live == []


def test_a_publication_that_fails_ends_rank_0_before_its_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    ledger = Ledger(4)
    ledger.before = lambda event: (
        monkeypatch.setattr("rillflow.weights.sealed._write", full) if event == "publish 1" else None
    )
    with pytest.raises(DiskFull):
        start_ranks(tmp_path, ledger, 2)
    assert [version for _, version in ledger.live] == [1]
