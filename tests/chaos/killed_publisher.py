"""A trainer's publications alone, for a process that is killed: it begins where the last one was, publishes, prunes and
goes back now and then, until it is killed. The content of a version is a function of its number, so readers can check
it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from rillflow.weights.store import FolderStore


def content(version: int) -> dict[str, torch.Tensor]:
    """Two versions differ in some weights of a hundred."""
    base, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(version + 1)
    embed = torch.randn(200, 64, generator=base).bfloat16()
    norm = torch.ones(64).bfloat16()
    places = torch.rand(embed.shape, generator=own) < 0.02
    embed[places] = torch.randn(int(places.sum()), generator=own).bfloat16()
    norm[version % 64] = 2.0
    return {"embed": embed, "norm": norm, "head": embed}


def publish_for_ever(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    store = FolderStore(folder, deltas=True, snapshot_every=5)
    head = store.head()
    if head is None:
        head = 0
        store.publish(content(0), 0, None)
    store.rewind(head)
    store.mend(content(head), head)
    while True:
        version = store.highest() + 1
        store.publish(content(version), version, store.head())
        if draw.random() < 0.3:
            store.prune(keep=3)
        if draw.random() < 0.15:
            live = [one for one in store.versions() if one not in store.line().orphaned]
            back = draw.choice(live[-3:])
            store.rewind(back)
            store.mend(content(back), back)


if __name__ == "__main__":
    torch.set_num_threads(1)
    publish_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
