"""Stores that write deltas of a small model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rillflow.weights import FolderStore

SHAPE = (40, 50)


def weights(version: int, dtype: torch.dtype = torch.bfloat16, share: float = 0.02) -> dict[str, torch.Tensor]:
    """The weights of a small model with a tied head, a number and a mask; a few change with every version."""
    generator = torch.Generator().manual_seed(7)
    embed, norm = torch.randn(SHAPE, generator=generator), torch.ones(7)
    for _ in range(version):
        embed = torch.where(torch.rand(SHAPE, generator=generator) < share, embed * 1.02, embed)
    cast = embed.to(dtype)
    mask = torch.zeros(5, dtype=torch.int64)
    mask[0] = version // 3
    return {"embed": cast, "head": cast, "norm": norm.to(dtype), "mask": mask, "scale": torch.tensor(3.5).to(dtype)}


def opened(folder: Path, every: int = 4, key: bytes = b"") -> FolderStore:
    return FolderStore(folder, key, deltas=True, snapshot_every=every)


def filled(folder: Path, versions: int, every: int = 4) -> FolderStore:
    store = opened(folder, every)
    for version in range(versions):
        store.publish(weights(version), version, store.head())
    return store


def files(folder: Path, version: int) -> set[str]:
    return {path.name for path in (folder / f"v{version:08d}").iterdir()} - {"manifest.json"}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


DELTA, WHOLE = {"delta.rfd"}, {"model.safetensors"}
