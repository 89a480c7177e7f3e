"""Tensors to bytes and back: safetensors, each shared tensor once, in shards that bound the memory of a reader.

Invariant: `decode` of what `encode` made has the same names, dtypes, shapes and bits; names that shared one tensor
share one again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rillflow.errors import CorruptData

SHARD_BYTES = 2 << 30


class TensorFacts(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def unique(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors without repetition, and for each name left out (tied weights) the name that stands for it."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            kept[name] = tensor
    return kept, aliases


def encode(tensors: Mapping[str, torch.Tensor], stem: str = "model") -> Iterator[tuple[str, bytes]]:
    """Named shards, made one at a time. `tensors` must be `unique`."""
    shards = list(_shards(tensors))
    for number, names in enumerate(shards, start=1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}.safetensors"
        yield name, save({key: _own(tensors[key]) for key in names})


def decode(data: bytes, source: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except SafetensorError as error:
        raise CorruptData(f"{source} is not a safetensors file: {error}", "it is damaged") from error
    return tensors


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, in memory of its own: safetensors refuses views that share storage."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()
