"""A trainer's weight store with real deltas, and a source that can be made to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rillflow.errors import RillflowError
from rillflow.weights.manifest import Line, VersionManifest
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

Weights = dict[str, torch.Tensor]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Trainer:
    """Publishes versions that differ in a few weights; `published` has all of them. `head` is tied to `embed`."""

    def __init__(self, folder: Path, *, snapshot_every: int = 100, seed: int = 0) -> None:
        self.store = FolderStore(folder, deltas=True, snapshot_every=snapshot_every)
        self.published: dict[int, Weights] = {}
        self._random = torch.Generator().manual_seed(seed)
        embed = self._draw(64, 32)
        self.weights: Weights = {
            "embed": embed,
            "up": self._draw(128, 32),
            "still": self._draw(32),
            "scale": torch.rand(16, generator=self._random),
            "steps": torch.tensor([0, 7]),
            "head": embed,
        }

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).bfloat16()

    def change(self, share: float = 0.02) -> None:
        for name in ("embed", "up", "scale"):
            tensor = self.weights[name]
            places = torch.rand(tensor.shape, generator=self._random) < share
            places.view(-1)[:1] = True
            tensor[places] = (tensor[places].float() * 1.01 + 0.001).to(tensor.dtype)

    def publish(self, count: int = 1, share: float = 0.02) -> int:
        """So many further versions; returns the last."""
        for _ in range(count):
            parent = self.store.head()
            version = self.store.highest() + 1
            if parent is not None:
                self.change(share)
            self.store.publish(self.weights, version, parent)
            self.published[version] = {name: tensor.clone() for name, tensor in self.weights.items()}
        return version

    def rewind(self, version: int) -> None:
        """As a trainer that restarts from the checkpoint of `version`."""
        self.store.rewind(version)
        for name, tensor in self.published[version].items():
            self.weights[name].copy_(tensor)
        self.store.mend(self.weights, version)


class Source(FolderSource):
    """Counts its calls; `before` is called for every file before it is handed out, and may raise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: list[tuple[int, str]] = []
        self.forgotten: list[int] = []
        self.before: Callable[[int, str], None] = lambda version, name: None
        self.away: RillflowError | None = None

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        if self.away is not None:
            raise self.away
        return await super().line(known, wait)

    async def manifest(self, version: int) -> VersionManifest:
        if self.away is not None:
            raise self.away
        return await super().manifest(version)

    async def file(self, version: int, name: str) -> Path:
        self.before(version, name)
        if self.away is not None:
            raise self.away
        self.files.append((version, name))
        return await super().file(version, name)

    async def forget(self, version: int) -> None:
        self.forgotten.append(version)

    def took(self) -> list[tuple[int, str]]:
        taken, self.files = self.files, []
        return taken
