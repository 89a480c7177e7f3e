"""Versions that evaluations need stay in the weight store, however many versions follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.errors import Unavailable
from rillflow.trainer.publisher import Publisher, Retention
from rillflow.weights import FolderStore


def publish(store: FolderStore, retention: Retention, last: int) -> None:
    publisher = Publisher(store, torch.float32, retention)
    store.publish({"w": torch.zeros(1)}, 0, None)
    for version in range(1, last + 1):
        publisher.take({"w": torch.full((1,), float(version))})
        publisher.publish(version, version - 1)


def test_the_version_that_is_wanted_stays_until_another_is(tmp_path: Path) -> None:
    store, wanted = FolderStore(tmp_path), {2}
    publish(store, Retention(keep=1, wanted=lambda: wanted), 6)
    assert store.versions() == [0, 2, 6]
    wanted.clear()
    Publisher(store, torch.float32, Retention(keep=1, wanted=lambda: wanted)).prune()
    assert store.versions() == [0, 6]


@pytest.mark.parametrize("error", [Unavailable("the service is away"), TimeoutError()])
def test_nothing_is_removed_while_nobody_tells_what_is_wanted(tmp_path: Path, error: Exception) -> None:
    def unknown() -> list[int]:
        raise error

    store = FolderStore(tmp_path)
    publish(store, Retention(keep=1, wanted=unknown), 4)
    assert store.versions() == [0, 1, 2, 3, 4]
