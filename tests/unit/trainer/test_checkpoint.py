"""Checkpoints: exact, atomic, and never used when damaged."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from loop_world import Unigram
from trainer_helpers import random_rows

from rillflow.errors import CheckpointError, DiskFull
from rillflow.trainer.checkpoint import Checkpoints, State, random_state, restore_random
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
        with pytest.raises(CheckpointError, match="none of the checkpoints"):
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
