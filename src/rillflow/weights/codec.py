"""Tensors to bytes and back: safetensors, each shared tensor once, in shards that bound the memory of a reader.

Invariants: `decode` of what `encode` made has the same names, dtypes, shapes and bits; names that shared one tensor
share one again. A tensor that lies on the host, contiguous, is written from where it lies, without a copy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.manifest import TensorFacts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from rillflow.weights.manifest import VersionManifest

SHARD_BYTES = 2 << 30
_CHANGED = "the manifest was changed"
_ALIGNMENT = 8
# As the format calls them.
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


def encode(
    tensors: Mapping[str, torch.Tensor], stem: str = "model", notes: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
    """Named shards and their bytes, made as they are asked for. `tensors` must be `unique`; `notes` go into each
    shard's header, where any reader of the format finds them."""
    shards = list(_shards(tensors))
    for number, names in enumerate(shards, start=1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}.safetensors"
        yield name, _file({key: tensors[key] for key in names}, notes or {})


def _file(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece: the widest numbers first, so that all of them lie aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise WeightsError(f"{name} has dtype {tensor.dtype}, which no file can hold", "convert it to another one")
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield _bytes(tensors[name])


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
    """The tensors of a whole version (or of the adapter that it is), aliases among them, from files by their names in
    the manifest. Whoever got the files has verified their hashes."""
    return assembled(manifest, {name: decode(path.read_bytes(), str(path)) for name, path in paths.items()})


def assembled(manifest: VersionManifest, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All tensors of these files, which must be what the manifest says."""
    tensors = {name: tensor for of_file in files.values() for name, tensor in of_file.items()}
    if {name: tensor_facts(tensor) for name, tensor in tensors.items()} != manifest.tensors:
        raise CorruptData(f"version {manifest.version} has other tensors than its manifest names", _CHANGED)
    return tied(tensors, manifest)


def tied(tensors: Mapping[str, torch.Tensor], manifest: VersionManifest) -> dict[str, torch.Tensor]:
    """The tensors, and under the names of the manifest's aliases those that they stand for."""
    if not set(manifest.aliases.values()) <= set(tensors):
        raise CorruptData(f"version {manifest.version} has aliases of tensors it does not hold", _CHANGED)
    return {**tensors, **{alias: tensors[name] for alias, name in manifest.aliases.items()}}


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
