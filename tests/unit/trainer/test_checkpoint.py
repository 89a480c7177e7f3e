"""Checkpoints: exact, atomic, and never used when damaged."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_helpers import learner, random_rows, small_model

from rillflow.errors import CheckpointError, DiskFull
from rillflow.trainer.checkpoint import Checkpoint, Checkpoints, State, random_state, restore_random
from rillflow.trainer.step import Learner


def saved(folder: Path, version: int, trained: Learner, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    state = State(version=version, step=trained.steps, recipe="r", random=random_state())
    checkpoints.save(Checkpoint(state=state, masters=trained.masters(), moments=trained.moments()))
    return checkpoints


def test_a_run_continued_from_disk_is_bit_identical(tmp_path: Path) -> None:
    straight = learner(in_order=True)
    for seed in range(2):
        straight.step([random_rows(seed)])
    checkpoints = saved(tmp_path, 2, straight)
    for seed in range(2, 5):
        straight.step([random_rows(seed)])
    found = checkpoints.latest_valid()
    assert found is not None
    resumed = learner(small_model(seed=5), in_order=True)
    resumed.restore(found.masters, found.moments, found.state.step)
    for seed in range(2, 5):
        resumed.step([random_rows(seed)])
    mine, theirs = straight.masters() | straight.moments(), resumed.masters() | resumed.moments()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_random_state_is_part_of_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, learner())
    expected = torch.rand(3)
    found = checkpoints.latest_valid()
    assert found is not None
    restore_random(found.state.random)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for version in (1, 4, 9):
        checkpoints = saved(tmp_path, version, learner(), keep=2)
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
    trained = learner()
    trained.step([random_rows(0)])
    saved(tmp_path, 3, trained)
    checkpoints = saved(tmp_path, 7, trained)
    damage(tmp_path / "c00000007")
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest_valid()
    assert found is not None
    assert found.state.version == 3
    assert "checkpoint 7 is damaged" in caplog.text
    # Set aside, so that it cannot come back after the line has gone on from 3.
    assert checkpoints.versions() == [3]
    assert (tmp_path / "damaged-c00000007").is_dir()


def test_none_valid_is_an_error_every_time_and_never_a_silent_new_start(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, learner())
    flip(tmp_path / "c00000003" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none of the checkpoints"):
            checkpoints.latest_valid()


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, learner())
    path = tmp_path / "c00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model-x/../../../secret"] = manifest["files"].pop("model.safetensors")
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoints.latest_valid()


def test_a_full_disk_leaves_nothing_and_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 3, learner())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.weights.sealed.os.fsync", full)
        with pytest.raises(DiskFull):
            saved(tmp_path, 4, learner())
    assert os.listdir(tmp_path) == ["c00000003"]
    assert checkpoints.latest_valid() is not None
