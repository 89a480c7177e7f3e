"""Tensors to bytes and back (safetensors, each shared tensor once), and low-rank adapters.

Tensors are written in shards, which bound the memory of a reader. A contiguous tensor on the host is written without a
copy. A LoRA policy publishes its adapter instead of all weights:

    model.layers.0.self_attn.q_proj.weight.lora_A    rank x in
    model.layers.0.self_attn.q_proj.weight.lora_B    out x rank

Invariants: `decode` after `encode` gives the same names, dtypes, shapes and bits; names that shared a tensor share one
again. A weight with an adapter is `W + alpha / rank * B A`, computed in fp32 and cast to the dtype of `W`, wherever it
is merged; other weights are those of the base.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.manifest import TensorFacts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from rillflow.contracts import Tensors
    from rillflow.weights.manifest import VersionManifest


SHARD_BYTES = 2 << 30
_CHANGED = "the manifest was changed"
_ALIGNMENT = 8
# The format's names.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_facts(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorFacts:
    """Return the facts of a tensor, or of the tensor in another `dtype`."""
    return TensorFacts(dtype=str(dtype or tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def unique(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without repetition, and for each alias (a tied weight) the name of its tensor."""
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


class Pieces(NamedTuple):
    """A tensor in consecutive pieces, which together have as many weights as its shape says."""

    dtype: torch.dtype
    shape: Sequence[int]
    pieces: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode(
    tensors: Mapping[str, torch.Tensor | Pieces], stem: str = "model", notes: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
    """Yield named shards and their bytes, lazily. `tensors` must be `unique`. `notes` go into each shard's header."""
    shards = list(_shards(tensors))
    for number, names in enumerate(shards, start=1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}.safetensors"
        yield name, _file({key: tensors[key] for key in names}, notes or {})


def _file(tensors: Mapping[str, torch.Tensor | Pieces], notes: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file, the widest numbers first, so that all of them are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise WeightsError(f"{name} has dtype {tensor.dtype}, which safetensors cannot store", "convert it first")
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        tensor = tensors[name]
        yield from map(_bytes, tensor.pieces if isinstance(tensor, Pieces) else [tensor])


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data


def decode(data: bytes, source: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except SafetensorError as error:
        raise CorruptData(f"{source} is not a safetensors file: {error}", "it is damaged") from error
    return tensors


def read_version(manifest: VersionManifest, paths: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Read the tensors of a whole version or an adapter, with aliases, from verified files by their manifest names."""
    return assembled(manifest, {name: decode(path.read_bytes(), str(path)) for name, path in paths.items()})


def assembled(manifest: VersionManifest, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return all tensors of these files; CorruptData if they differ from the manifest."""
    tensors = {name: tensor for of_file in files.values() for name, tensor in of_file.items()}
    if {name: tensor_facts(tensor) for name, tensor in tensors.items()} != manifest.tensors:
        raise CorruptData(f"version {manifest.version} has other tensors than its manifest names", _CHANGED)
    return tied(tensors, manifest)


def tied(tensors: Mapping[str, torch.Tensor], manifest: VersionManifest) -> dict[str, torch.Tensor]:
    """Return the tensors, also under the manifest's aliases."""
    if not set(manifest.aliases.values()) <= set(tensors):
        raise CorruptData(f"version {manifest.version} has aliases of tensors it does not hold", _CHANGED)
    return {**tensors, **{alias: tensors[name] for alias, name in manifest.aliases.items()}}


def _shards(tensors: Mapping[str, torch.Tensor | Pieces]) -> Iterator[list[str]]:
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


# ---------------------------------------------------------------- low-rank adapters


LORA_A, LORA_B = ".lora_A", ".lora_B"


@dataclass(frozen=True)
class Adapter:
    """An adapter; `tensors` are named by the weights that they change, with the endings `LORA_A` and `LORA_B`."""

    tensors: Tensors
    rank: int
    alpha: float

    @property
    def weights(self) -> list[str]:
        """Return the names of the weights that it changes."""
        return [name.removesuffix(LORA_A) for name in self.tensors if name.endswith(LORA_A)]


def merged(base: Tensors, adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return the base's tensors with the adapter merged; tensors that it does not change are the base's, not copies."""
    changed = {}  # by the id of the base's tensor, so tied weights change together
    for name in _fitting(base, adapter):
        weight, scale = base[name], adapter.alpha / adapter.rank
        low, high = (adapter.tensors[name + end].to(weight.device, torch.float32) for end in (LORA_A, LORA_B))
        changed[id(weight)] = torch.addmm(weight.float(), high, low, alpha=scale).to(weight.dtype)
    return {name: changed.get(id(tensor), tensor) for name, tensor in base.items()}


def _fitting(base: Tensors, adapter: Adapter) -> list[str]:
    names = adapter.weights
    if {name + end for name in names for end in (LORA_A, LORA_B)} != set(adapter.tensors):
        raise CorruptData("an adapter has tensors without their counterpart", "it was changed after it was written")
    for name in names:
        low, high = adapter.tensors[name + LORA_A], adapter.tensors[name + LORA_B]
        if name not in base or low.ndim != 2 or high.ndim != 2 or low.shape[0] != high.shape[1]:
            raise CorruptData(
                f"an adapter does not fit {name} of the base", "adapter and base belong to different models"
            )
        if base[name].shape != (high.shape[0], low.shape[1]):
            raise CorruptData(
                f"the adapter of {name} has another shape than the base's weight", "use the adapter's base"
            )
    return names
