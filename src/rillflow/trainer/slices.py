"""Which part of a tensor a rank writes into a checkpoint, and how any number of ranks reads such parts again.

Tensors are cut along their first axis as `torch.chunk` cuts, which is also how sharded models (FSDP2) are laid out. A
file says of each slice where it begins and how many rows the whole has. Invariant: what is read is put together from
slices that cover it, every row once, or CorruptData is raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rillflow.errors import CorruptData

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

SLICES = "slices"
Range = tuple[int, int]
Wanted = Callable[[str, tuple[int, ...]], Range]


def share(rows: int, rank: int, ranks: int) -> Range:
    """The rows of this rank; the last ranks may have none."""
    size = -(-rows // ranks)
    start = min(rank * size, rows)
    return start, min(start + size, rows)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, which is all of it unless it is sharded."""
    held: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return held


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own(tensors: Tensors, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What this rank writes, and the note that says of which rows. Single numbers are rank 0's."""
    mine: dict[str, torch.Tensor] = {}
    rows: dict[str, Range] = {}
    for name, tensor in tensors.items():
        start, stop = share(tensor.shape[0], rank, ranks) if tensor.ndim else (0, 1)
        if tensor.ndim == 0 and rank == 0:
            mine[name] = local(tensor)
        elif tensor.ndim and start < stop:
            mine[name] = local(tensor) if is_sharded(tensor) else tensor[start:stop]
            rows[name] = (start, tensor.shape[0])
    return mine, {SLICES: json.dumps(rows)} if ranks > 1 else {}


def wanted_by(like: Tensors, rank: int, ranks: int) -> Wanted:
    """Which rows of a tensor this rank needs: its shard of what is sharded in `like`, and of what has the name of such
    a tensor with a word (`exp_avg/`) before it and its shape; all of everything else."""
    sharded = {name: tuple(tensor.shape) for name, tensor in like.items() if is_sharded(tensor)}

    def wanted(name: str, shape: tuple[int, ...]) -> Range:
        if any(sharded.get(known) == shape for known in _bare(name)):
            return share(shape[0], rank, ranks)
        return 0, shape[0]

    return wanted


def _bare(name: str) -> Iterator[str]:
    """The name, and those without one of its words."""
    words = name.split("/")
    yield name
    for at in range(len(words) - 1):
        yield "/".join(words[:at] + words[at + 1 :])


def read(paths: Sequence[Path], wanted: Wanted) -> dict[str, torch.Tensor]:
    """The wanted rows of all tensors in these files, which have been verified."""
    pieces = _Pieces(wanted)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                pieces.add(file)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CorruptData(f"{path} is not a file of slices: {error}", "it is damaged") from error
    return pieces.whole()


class _Pieces:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._found: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def add(self, file: Any) -> None:
        notes: Mapping[str, Range] = json.loads((file.metadata() or {}).get(SLICES, "{}"))
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            if shape:
                self._add(name, view, shape, notes.get(name, (0, shape[0])))
            else:
                self._found[name] = file.get_tensor(name)

    def _add(self, name: str, view: Any, shape: tuple[int, ...], place: Range) -> None:
        """`place` is where the slice begins, and the rows of the whole."""
        offset, rows = place
        start, stop = self._wanted(name, (rows, *shape[1:]))
        low, high = max(start, offset), min(stop, offset + shape[0])
        piece = view[low - offset : high - offset] if low < high else view[:0]
        if name not in self._found:
            alone = low == start and high == stop
            self._found[name] = piece if alone else torch.empty((stop - start, *shape[1:]), dtype=piece.dtype)
            self._missing[name] = stop - start
        if low < high:
            self._found[name][low - start : high - start] = piece
            self._missing[name] -= high - low

    def whole(self) -> dict[str, torch.Tensor]:
        if torn := [name for name, rows in self._missing.items() if rows]:
            raise CorruptData(f"the slices of {torn[0]} do not make a whole", "a file of the checkpoint is missing")
        return self._found
