"""Checkpoints of several ranks: each writes its slices, and any number of ranks reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from thread_peers import ThreadPeers, in_ranks

from forked_ranks import run_ranks
from rillflow.errors import CorruptData, StorageError
from rillflow.trainer.checkpoint import Checkpoint, Checkpoints, State
from rillflow.trainer.slices import own, read, share, wanted_by

RANK = Path(__file__).with_name("checkpointing_rank.py")
SHAPES = {"embed": (13, 3), "norm": (4,), "critic/head": (1, 5), "few": (2, 2), "scale": ()}


class Sharded:
    """What slices need to know of a tensor of which this rank holds a part, as a DTensor says it."""

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
    with pytest.raises(CorruptData, match="do not make a whole"):
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
    """Of a tensor that is sharded four ways, no rank gets more than its quarter out of the files."""
    whole = {"w": torch.arange(40.0).reshape(20, 2)}
    mine, _ = own(whole, 0, 1)
    assert torch.equal(mine["w"], whole["w"])
    wanted = wanted_by({"w": Sharded(whole["w"], 2, 4)}, 2, 4)  # type: ignore[dict-item]
    assert wanted("w", (20, 2)) == (10, 15)
    assert wanted("exp_avg/w", (20, 2)) == (10, 15)
    assert wanted("other", (20, 2)) == (0, 20)
    assert wanted("step/w", (1,)) == (0, 1)
    assert read([], wanted) == {}


@pytest.mark.slow
def test_real_sharded_tensors_in_real_processes(tmp_path: Path) -> None:
    for task, ranks in (("save", 2), ("load", 4)):
        run_ranks(RANK, ranks, tmp_path, str(tmp_path / "c"), task)
    found = Checkpoints(tmp_path / "c", 2).load(1)
    assert torch.equal(found.masters["w"], torch.arange(21.0).reshape(7, 3))
    assert torch.equal(found.moments["step/w"], torch.tensor(3.0))
