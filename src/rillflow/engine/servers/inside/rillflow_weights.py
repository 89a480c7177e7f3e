"""Weights of a running server, changed in place and verified: a worker extension of vLLM (`--worker-extension-cls`),
and what SGLang's custom weight loader calls.

Where a published tensor lives in the server's own parameters (fused projections, shards of tensor parallel ranks, tied
heads) is learnt from the model's own loader: it is asked to load tensors without data, and its copies are recorded
instead of made. Invariants: weights keep their storage, so that captured graphs stay valid; nothing is written before
the names, sizes and dtypes of all that comes were checked; fingerprints are sums over what a rank really holds, read
after it was written.

Imports only the standard library, torch and numpy: it runs in the server's environment, not in Rillflow's.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_STEP, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 8
_CHUNK = 1 << 22  # words that are hashed at once: bounds the memory of it
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32}


class Place(NamedTuple):
    """A part of a published tensor, by its flat place there, and the storage of this rank that holds it."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    held: torch.Tensor


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the copies that a loader makes from tensors without data, and does not make them."""

    def __init__(self, sources: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self.places: dict[str, list[Place]] = {name: [] for name in sources}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            held, source = args[0], args[1]
            name = self._names.get(source.untyped_storage()._cdata)
            if name is not None and held.shape == source.shape and not held.is_meta:
                place = Place(source.storage_offset(), tuple(source.shape), tuple(source.stride()), held.detach())
                self.places[name].append(place)
            return held
        return function(*args, **(kwargs or {}))


class RillflowWorker:
    """Joined to vLLM's worker class; its methods are called through `collective_rpc` with plain arguments."""

    def rillflow_layout(self, shapes: dict[str, list[int]], dtype: str) -> dict[str, Any]:
        """Learn where tensors of these names and shapes live. Answers, for each, how it is spread on this rank."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        wanted = getattr(torch, dtype)
        sources = {name: torch.empty(shape, dtype=wanted, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(sources)
        with recorder, torch.no_grad():
            model.load_weights(iter(sources.items()))  # type: ignore[operator]
        self.rillflow_places = recorder.places
        self.rillflow_facts = {name: (tuple(shape), wanted) for name, shape in shapes.items()}
        held = {place.held.untyped_storage().data_ptr() for places in recorder.places.values() for place in places}
        every = [(name, place) for name, places in recorder.places.items() for place in places]
        return {
            "spread": {name: [_key(place) for place in places] for name, places in recorder.places.items()},
            "other_dtype": sorted({name for name, place in every if place.held.dtype is not wanted}),
            "unaligned": sorted({name for name, place in every if _rows(place, wanted.itemsize) is None}),
            "uncovered": sorted(
                name
                for name, parameter in model.named_parameters()
                if parameter.numel() and parameter.untyped_storage().data_ptr() not in held
            ),
        }

    def rillflow_load(self, paths: list[str]) -> dict[str, Any]:
        """Take over whole tensors from safetensors files; answers their fingerprints."""
        with torch.no_grad():
            return self._rillflow_changed(paths, self._rillflow_write_whole)

    def rillflow_patch(self, paths: list[str]) -> dict[str, Any]:
        """Take over `name:value` at the places `name:index` of flat tensors; without an index, all of a tensor."""
        with torch.no_grad():
            return self._rillflow_changed(paths, self._rillflow_write_some)

    def rillflow_fingerprints(self, names: list[str]) -> dict[str, Any]:
        """Of what is held of these tensors: the sum of each part, by its place."""
        with torch.no_grad():
            return {name: [[*_key(place), _hex(place)] for place in self.rillflow_places[name]] for name in names}

    # ------------------------------------------------------------ writing

    def _rillflow_changed(self, paths: list[str], write: Any) -> dict[str, Any]:
        entries = {entry: file for file in map(_File, paths) for entry in file.tensors}
        for entry in entries:
            self._rillflow_check(entry, entries)
        write(entries)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.rillflow_fingerprints(list(dict.fromkeys(entry.rpartition(":")[0] or entry for entry in entries)))

    def _rillflow_check(self, entry: str, entries: dict[str, _File]) -> None:
        name, _, part = entry.rpartition(":")
        known = self.rillflow_facts.get(name or entry)
        if known is None:
            raise ValueError(f"{entry} is not in the layout")
        if part == "index":
            return
        dtype, shape = entries[entry].facts(entry)
        whole, expected = known
        if name:
            index = f"{name}:index"
            whole = entries[index].facts(index)[1] if index in entries else (math.prod(whole),)
        if dtype != expected or shape != whole:
            raise ValueError(f"{entry} is {dtype} {shape}, the layout has {expected} {whole}")

    def _rillflow_write_whole(self, entries: dict[str, _File]) -> None:
        for name, file in entries.items():
            for place in self.rillflow_places[name]:
                _fill(place, file.read(name).to(place.held.device, non_blocking=True).reshape(-1))

    def _rillflow_write_some(self, entries: dict[str, _File]) -> None:
        for entry, file in entries.items():
            name, _, part = entry.rpartition(":")
            if part != "value":
                continue
            index = f"{name}:index"
            for place in self.rillflow_places[name]:
                value = file.read(entry).to(place.held.device, non_blocking=True)
                if index not in entries:
                    _fill(place, value)
                else:
                    _scatter(place, entries[index].read(index).to(place.held.device, non_blocking=True), value)


# ---------------------------------------------------------------- one part


def _fill(place: Place, flat: torch.Tensor) -> None:
    place.held.copy_(flat.as_strided(place.size, place.stride, flat.storage_offset() + place.offset))


def _scatter(place: Place, index: torch.Tensor, value: torch.Tensor) -> None:
    """Values at flat places of the published tensor, as far as this part has them."""
    local = index.to(torch.int64) - place.offset
    inside = local >= 0
    target = torch.zeros_like(local)
    for size, stride, step in zip(place.size, place.stride, place.held.stride(), strict=True):
        # Strides of a part of a contiguous tensor fall from the first dimension to the last.
        where = local.div(stride, rounding_mode="floor") if size > 1 else torch.zeros_like(local)
        inside &= where < size
        local = local - where * stride
        target += where * step
    inside &= local == 0
    held = place.held
    reach = sum((size - 1) * step for size, step in zip(held.shape, held.stride(), strict=True)) + 1
    flat = held.as_strided((reach,), (1,))
    flat[target[inside]] = value[inside]


def _rows(place: Place, itemsize: int) -> tuple[int, int, int] | None:
    """The part as rows of bytes: their number, their length and the way from one to the next."""
    length, rows, ahead = 1, 1, 0
    for size, stride in zip(reversed(place.size), reversed(place.stride), strict=True):
        if size == 1:
            continue
        if stride == length and rows == 1:
            length *= size
        elif rows == 1:
            rows, ahead = size, stride
        else:
            return None
    aligned = all(value * itemsize % _WORD == 0 for value in (place.offset, ahead))
    return (rows, length, ahead) if aligned and (rows == 1 or length * itemsize % _WORD == 0) else None


def _key(place: Place) -> list[Any]:
    return [place.offset, list(place.size), list(place.stride)]


def _hex(place: Place) -> str:
    """The part's share of the tensor's fingerprint: see Rillflow's `weights.fingerprint`."""
    held = place.held.contiguous().reshape(-1)
    shape = _rows(place, held.element_size())
    if shape is None:
        return ""
    rows, _, ahead = shape
    tail = -held.nbytes % _WORD
    data = held.view(torch.uint8)
    if tail:
        data = torch.cat([data, data.new_zeros(tail)])
    words = data.view(torch.int64).view(rows, -1)
    first = place.offset * held.element_size() // _WORD
    skip = ahead * held.element_size() // _WORD
    total = 0
    step = max(1, _CHUNK // max(1, words.shape[1]))
    for row in range(0, rows, step):
        for column in range(0, words.shape[1], _CHUNK):
            part = words[row : row + step, column : column + _CHUNK]
            number = torch.arange(part.shape[1], device=part.device) + (first + column)
            number = number + (torch.arange(row, row + part.shape[0], device=part.device) * skip)[:, None]
            total += int(_mixed(part + (number + 1) * _signed(_STEP)).sum())
    return f"{total % 2**64:016x}"


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser. int64 wraps as uint64 does; a shift to the right must not pull in the sign."""
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_A)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_B)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# ---------------------------------------------------------------- files


class _File:
    """A safetensors file, mapped: tensors are views of it."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self.tensors: dict[str, Any] = header
        self._start = 8 + size
        self._data = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)

    def facts(self, name: str) -> tuple[Any, tuple[int, ...]]:
        entry = self.tensors[name]
        return _DTYPES.get(entry["dtype"]), tuple(entry["shape"])

    def read(self, name: str) -> torch.Tensor:
        entry = self.tensors[name]
        begin, end = (self._start + at for at in entry["data_offsets"])
        return self._data[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _keep_weights_on_cpu() -> None:
    """vLLM's CPU build packs the weights of linear layers into a form of its own and drops them. Then nothing could be
    changed in place, so there they stay as they are and are multiplied as they are."""
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return
    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def plain(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain  # type: ignore[attr-defined]


if os.environ.get("RILLFLOW_INSIDE") == "vllm":  # in its processes, not where this file is only read
    _keep_weights_on_cpu()
