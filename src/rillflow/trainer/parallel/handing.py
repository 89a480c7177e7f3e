"""How ranks that write into one folder tell rank 0 what they have written: by small files in it.

Not over the network: what is written in the background must not speak where the threads that train do.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar

import msgspec

from rillflow.errors import StorageError
from rillflow.storage import write_atomic
from rillflow.types.decoding import json_decoder

S = TypeVar("S", bound=msgspec.Struct)

_LOOK = 0.05  # seconds between two looks


def hand_in(folder: Path, rank: int, news: msgspec.Struct) -> None:
    """Once everything it speaks of is durable."""
    write_atomic(_path(folder, rank), msgspec.json.encode(news))


def collect(folder: Path, rank: int, kind: type[S], patience: float) -> S:
    """What a rank has handed in, once it has; StorageError after `patience` seconds."""
    path, deadline = _path(folder, rank), time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            raise StorageError(
                f"rank {rank} has not written its part of {folder} within {patience:.0f} s",
                "all ranks must see the same run folder; see that rank's log",
            )
        time.sleep(_LOOK)
    news = json_decoder(kind).decode(path.read_bytes())
    path.unlink()
    return news


def _path(folder: Path, rank: int) -> Path:
    return folder / f".rank{rank:05d}.json"
