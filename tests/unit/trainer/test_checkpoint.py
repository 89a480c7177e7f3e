"""Checkpoints are exact, sealed, and readable by any number of ranks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from loop_world import Unigram
from safetensors import safe_open
from thread_peers import ThreadPeers, in_ranks
from trainer_helpers import random_rows

from commands import Warm
from forked_ranks import run_ranks
from rillflow.errors import CheckpointError, CorruptData, DiskFull, StorageError
from rillflow.trainer.checkpoint import (
    Checkpoint,
    Checkpoints,
    State,
    own_slices,
    random_state,
    read_slices,
    restore_random,
    wanted_by,
)
from rillflow.trainer.parallel import share
from rillflow.weights import sealed


def trained(steps: int = 1, worker: Unigram | None = None) -> Unigram:
    worker = worker or Unigram()
    for seed in range(worker.steps, worker.steps + steps):
        worker.step([random_rows(seed)], lambda: None, lambda: None)
    return worker


def state_of(worker: Unigram, version: int) -> State:
    return State(version=version, step=worker.steps, recipe="r", random=random_state())


def saved(folder: Path, version: int, worker: Unigram, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(state_of(worker, version), worker.masters(), worker.moments())
    return checkpoints


def test_a_run_continued_from_disk_is_bit_identical(tmp_path: Path) -> None:
    straight = trained(2)
    checkpoints = saved(tmp_path, 2, straight)
    trained(3, straight)
    found = checkpoints.latest_valid()
    assert found is not None
    resumed = Unigram(seed=5)
    resumed.restore(found.masters, found.moments, found.state.step)
    trained(3, resumed)
    mine, theirs = straight.masters() | straight.moments(), resumed.masters() | resumed.moments()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_is_written_is_what_it_was_when_it_was_begun(tmp_path: Path) -> None:
    worker = trained(2)
    before = {name: tensor.clone() for name, tensor in (worker.masters() | worker.moments()).items()}
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(state_of(worker, 2), worker.masters(), worker.moments())
    trained(2, worker)
    checkpoints.finish()
    found = checkpoints.load(2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in {**found.masters, **found.moments}.items())


def test_one_at_a_time_and_each_is_durable_when_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, worker = Checkpoints(tmp_path, 9), trained()
    for version in (1, 2, 3):
        checkpoints.begin(state_of(worker, version), worker.masters(), worker.moments())
        assert set(checkpoints.versions()) >= set(range(1, version))
        assert checkpoints.needed >= {*range(1, version), version}
    checkpoints.finish()
    assert checkpoints.versions() == [1, 2, 3]


def test_what_fails_while_writing_is_raised_at_the_next_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, worker = saved(tmp_path, 1, trained()), trained()
    monkeypatch.setattr("rillflow.weights.sealed.os.fsync", full)
    checkpoints.begin(state_of(worker, 2), worker.masters(), worker.moments())
    with pytest.raises(DiskFull, match="no space left"):
        checkpoints.finish()
    checkpoints.check()
    assert checkpoints.versions() == [1]


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_of_before_there_were_ranks(tmp_path: Path) -> None:
    """One file of each kind, without notes, and a state that knows of one random state."""
    worker = trained()
    folder = tmp_path / "c00000003"
    files = [
        ("model.safetensors", safetensors.torch.save(worker.masters())),
        ("optimizer.safetensors", safetensors.torch.save(worker.moments())),
        ("state.json", json.dumps({"version": 3, "step": 1, "recipe": "r", "random": random_state()}).encode()),
    ]
    sealed.seal(folder, files)
    found = Checkpoints(tmp_path, 2).latest_valid()
    assert found is not None
    assert (found.state.version, found.state.peers) == (3, [])
    assert all(torch.equal(tensor, found.masters[name]) for name, tensor in worker.masters().items())
    assert all(torch.equal(tensor, found.moments[name]) for name, tensor in worker.moments().items())


def test_the_random_state_is_part_of_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, Unigram())
    expected = torch.rand(3)
    found = checkpoints.latest_valid()
    assert found is not None
    restore_random(found.state.random)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for version in (1, 4, 9):
        checkpoints = saved(tmp_path, version, Unigram(), keep=2)
    assert checkpoints.versions() == [4, 9]
    assert sorted(os.listdir(tmp_path)) == ["c00000004", "c00000009"]


def test_nothing_was_ever_written(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", 2).latest_valid() is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: list[Callable[[Path], None]] = [
    lambda c: flip(c / "model.safetensors"),
    lambda c: flip(c / "optimizer.safetensors"),
    lambda c: (c / "state.json").write_text('{"version": 7}') and None,
    lambda c: os.truncate(c / "optimizer.safetensors", 100),
    lambda c: (c / "manifest.json").unlink(),
    lambda c: os.truncate(c / "manifest.json", 20),
    lambda c: (c / "model.safetensors").unlink(),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    worker = trained()
    saved(tmp_path, 3, worker)
    checkpoints = saved(tmp_path, 7, worker)
    damage(tmp_path / "c00000007")
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest_valid()
    assert found is not None
    assert found.state.version == 3
    assert "checkpoint 7 is damaged" in caplog.text
    # Set aside, so that it cannot come back after the line has gone on from 3.
    assert checkpoints.versions() == [3]
    assert (tmp_path / "damaged-c00000007").is_dir()


def test_a_number_that_was_damaged_before_may_be_damaged_again(tmp_path: Path) -> None:
    """Supervised training makes a step again under its old number."""
    saved(tmp_path, 3, Unigram())
    for _ in range(2):
        checkpoints = saved(tmp_path, 7, Unigram())
        flip(tmp_path / "c00000007" / "model.safetensors")
        found = checkpoints.latest_valid()
        assert found is not None
        assert found.state.version == 3
    assert len(list(tmp_path.glob("damaged-c00000007*"))) == 2


def test_none_valid_is_an_error_every_time_and_never_a_silent_new_start(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, Unigram())
    flip(tmp_path / "c00000003" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            checkpoints.latest_valid()


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, Unigram())
    path = tmp_path / "c00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model-x/../../../secret"] = manifest["files"].pop("model.safetensors")
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoints.latest_valid()


def test_a_full_disk_leaves_nothing_and_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 3, Unigram())
    with monkeypatch.context() as patched:
        patched.setattr("rillflow.weights.sealed.os.fsync", full)
        with pytest.raises(DiskFull):
            saved(tmp_path, 4, Unigram())
    assert os.listdir(tmp_path) == ["c00000003"]
    assert checkpoints.latest_valid() is not None


RANK = Path(__file__).with_name("checkpointing_rank.py")
SHAPES = {"embed": (13, 3), "norm": (4,), "critic/head": (1, 5), "few": (2, 2), "scale": ()}


class Sharded:
    """The facts on a tensor of which this rank holds a part, as a DTensor has them."""

    def __init__(self, whole: torch.Tensor, rank: int, ranks: int) -> None:
        start, stop = share(len(whole), rank, ranks)
        self.shape, self.ndim = whole.shape, whole.ndim
        self._local = whole[start:stop].clone()

    def to_local(self) -> torch.Tensor:
        return self._local


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moments() -> dict[str, torch.Tensor]:
    named = {f"exp_avg/{name}": tensor * 2 for name, tensor in tensors().items() if "/" not in name}
    return named | {"critic/exp_avg/head": tensors()["critic/head"] * 2, "step/embed": torch.tensor(7.0)}


def of_rank(whole: dict[str, torch.Tensor], peers: ThreadPeers, sharded: bool) -> Any:
    if not sharded:
        return whole
    return {name: Sharded(t, peers.rank, peers.size) if t.ndim else t for name, t in whole.items()}


def save(folder: Path, ranks: int, *, sharded: bool = False, version: int = 5) -> None:
    def work(peers: ThreadPeers) -> None:
        state = State(version=version, step=5, recipe="r", random={"cpu": f"of rank {peers.rank}"})
        masters, moved = of_rank(tensors(), peers, sharded), of_rank(moments(), peers, sharded)
        Checkpoints(folder, 2, peers, deadline=20).save(state, masters, moved)

    in_ranks(ranks, work)


def load(folder: Path, ranks: int, *, sharded: bool = False) -> list[Checkpoint]:
    def work(peers: ThreadPeers) -> Checkpoint:
        found = Checkpoints(folder, 2, peers).latest_valid(of_rank(tensors(), peers, sharded))
        assert found is not None
        return found

    return in_ranks(ranks, work)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (4, 2), (2, 4), (4, 1), (1, 4), (3, 5)])
def test_any_number_of_ranks_reads_any_checkpoint(tmp_path: Path, wrote: int, reads: int, sharded: bool) -> None:
    save(tmp_path, wrote, sharded=sharded)
    for rank, found in enumerate(load(tmp_path, reads)):
        assert found.state.random_of(rank) == ({"cpu": f"of rank {rank}"} if rank < wrote else {})
        for name, tensor in (tensors() | moments()).items():
            assert torch.equal({**found.masters, **found.moments}[name], tensor)
    for rank, found in enumerate(load(tmp_path, reads, sharded=True)):
        for name, tensor in (tensors() | moments()).items():
            start, stop = share(len(tensor), rank, reads) if tensor.ndim else (0, 0)
            expected = tensor[start:stop] if tensor.ndim else tensor
            assert torch.equal({**found.masters, **found.moments}[name], expected), name


def test_each_rank_writes_its_part_and_says_which(tmp_path: Path) -> None:
    save(tmp_path, 4)
    folder = tmp_path / "c00000005"
    assert sorted(os.listdir(folder)) == sorted(
        ["manifest.json", "state.json"]
        + [f"{stem}-rank{rank:05d}.safetensors" for stem in ("model", "optimizer") for rank in range(4)]
    )
    with safe_open(folder / "model-rank00001.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["slices"])["embed"] == [4, 13]
        assert torch.equal(file.get_tensor("embed"), tensors()["embed"][4:8])
    sizes = [(folder / f"model-rank{rank:05d}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) < 2 * sum(sizes) / 4


def test_a_byte_changed_in_one_file_is_seen_by_all_ranks(tmp_path: Path) -> None:
    save(tmp_path, 2, version=3)
    save(tmp_path, 2, version=5)
    for name in ("model-rank00001.safetensors", "optimizer-rank00000.safetensors"):
        path = tmp_path / "c00000005" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert [found.state.version for found in load(tmp_path, 4)] == [3] * 4
        os.rename(tmp_path / "damaged-c00000005", tmp_path / "c00000005")


def test_a_checkpoint_without_the_slices_of_a_rank_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = tmp_path / "c00000005" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["model-rank00001.safetensors"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptData, match="are incomplete"):
        Checkpoints(tmp_path, 2).load(5)


def test_a_rank_that_never_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.checkpoint.hand_in", lambda *arguments: None)

    def work(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(tmp_path, 2, peers, deadline=2.0)
        checkpoints.save(State(version=1, step=1, recipe="", random={}), tensors(), {})

    with pytest.raises(StorageError, match="rank 1 has not written"):
        in_ranks(2, work)
    assert Checkpoints(tmp_path, 2).versions() == []
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_never_taken_for_a_part(tmp_path: Path) -> None:
    """Not even of the same version: every write has a name of its own."""
    left = tmp_path / ".c00000005.0123.tmp"
    left.mkdir()
    (left / ".rank00001.json").write_text('{"files": {}, "random": {}}')
    save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["c00000005"]
    assert torch.equal(load(tmp_path, 1)[0].masters["embed"], tensors()["embed"])


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """No rank reads more than its quarter of a tensor that is sharded four ways."""
    whole = {"w": torch.arange(40.0).reshape(20, 2)}
    mine, _ = own_slices(whole, 0, 1)
    assert torch.equal(mine["w"], whole["w"])
    wanted = wanted_by({"w": Sharded(whole["w"], 2, 4)}, 2, 4)  # type: ignore[dict-item]
    assert wanted("w", (20, 2)) == (10, 15)
    assert wanted("exp_avg/w", (20, 2)) == (10, 15)
    assert wanted("other", (20, 2)) == (0, 20)
    assert wanted("step/w", (1,)) == (0, 1)
    assert read_slices([], wanted) == {}


def test_a_file_that_has_no_slices_is_named(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    path.write_bytes(b"no tensors here")
    with pytest.raises(CorruptData, match=r"optimizer\.safetensors is not a file of slices"):
        read_slices([path], wanted_by({}, 0, 1))


@pytest.mark.slow
def test_real_sharded_tensors_in_real_processes(warm: Warm, tmp_path: Path) -> None:
    for task, ranks in (("save", 2), ("load", 4)):
        run_ranks(RANK, ranks, tmp_path, str(tmp_path / "c"), task, warm=warm)
    found = Checkpoints(tmp_path / "c", 2).load(1)
    assert torch.equal(found.masters["w"], torch.arange(21.0).reshape(7, 3))
    assert torch.equal(found.moments["step/w"], torch.tensor(3.0))
