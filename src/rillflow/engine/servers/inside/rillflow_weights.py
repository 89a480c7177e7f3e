"""Weights of a running server, changed in place and verified: a worker extension of vLLM (`--worker-extension-cls`),
and what SGLang's custom weight loader calls.

Where a published tensor lives in the server's own parameters (fused projections, shards of tensor parallel ranks, tied
heads) is learnt from the model's own loader: it is asked to load tensors without data, and its copies are recorded
instead of made. Invariants: weights keep their storage, so that captured graphs stay valid; nothing is written before
the names, sizes and dtypes of all that comes were checked; fingerprints are sums over what a rank really holds, read
after it was written.

Imports only the standard library, torch, numpy and what lies beside it: it runs in the server's environment, not in
Rillflow's.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Inside a server this folder is on the path; in Rillflow it is part of a package.
_delta, _logprobs = (
    importlib.import_module(f"{__package__}.{name}" if __package__ else name)
    for name in ("rillflow_delta", "rillflow_logprobs")
)

_STEP, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 8
_CHUNK = 1 << 22  # words that are hashed at once: bounds the memory of it
_UPLOAD = 256 << 20  # bytes of a file that is copied to the device in one go
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32}


class Place(NamedTuple):
    """A part of a published tensor, by its flat place there, and the storage of this rank that holds it."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    held: torch.Tensor


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the copies that a loader makes from tensors without data, and does not make them. Nothing else is written
    into the model either; a place that its loader changes once more (such as `A = -exp(A_log)`) is forgotten."""

    def __init__(self, sources: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._held = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.places: dict[str, list[Place]] = {name: [] for name in sources}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            held, source = args[0], args[1]
            name = self._names.get(source.untyped_storage()._cdata)
            if name is not None and held.shape == source.shape and not held.is_meta:
                place = Place(source.storage_offset(), tuple(source.shape), tuple(source.stride()), held.detach())
                self.places[name].append(place)
            return held
        if function._schema.is_mutable and isinstance(args[0], torch.Tensor):
            written = args[0]
            if written.untyped_storage()._cdata in self._held:
                self._forget(written)
                return written
        return function(*args, **(kwargs or {}))

    def _forget(self, written: torch.Tensor) -> None:
        for name, places in self.places.items():
            self.places[name] = [place for place in places if not _overlap(place.held, written)]


class RillflowWorker:
    """Joined to vLLM's worker class; its methods are called through `collective_rpc` with plain arguments."""

    def rillflow_layout(
        self, shapes: dict[str, list[int]], dtype: str, pieces: dict[str, list[Any]] | None = None
    ) -> dict[str, Any]:
        """Learn where tensors of these names and shapes live. Answers, for each, how it is spread on this rank. The
        loader gets those that have `pieces` (name, offset, size, stride) piece by piece."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        wanted = getattr(torch, dtype)
        sources = {name: torch.empty(shape, dtype=wanted, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(sources, model)
        with recorder, torch.no_grad():
            model.load_weights(_given(sources, pieces or {}))  # type: ignore[operator]
        recorder.places = {name: _joined(places) for name, places in recorder.places.items()}
        self.rillflow_places = recorder.places
        self.rillflow_facts = {name: (tuple(shape), wanted) for name, shape in shapes.items()}
        held = {place.held.untyped_storage().data_ptr() for places in recorder.places.values() for place in places}
        every = [(name, place) for name, places in recorder.places.items() for place in places]
        return {
            "spread": {name: [_key(place) for place in places] for name, places in recorder.places.items()},
            "devices": sorted({place.held.device.type for _, place in every}),
            "other_dtype": sorted({name for name, place in every if place.held.dtype is not wanted}),
            "unaligned": sorted({name for name, place in every if _rows(place, wanted.itemsize) is None}),
            "uncovered": sorted(
                name
                for name, parameter in model.named_parameters()
                if parameter.numel() and parameter.untyped_storage().data_ptr() not in held
            ),
        }

    def rillflow_return_raw_logprobs(self) -> None:
        """Let vLLM's sampler return the model's own log-probs too, where a request asks for them."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.sampler is not None and not isinstance(runner.sampler, _logprobs.VllmSampler):
            runner.sampler = _logprobs.VllmSampler(runner.sampler)

    def rillflow_load(self, paths: list[str]) -> dict[str, Any]:
        """Take over whole tensors from safetensors files. Like every change of weights it answers what is `held`
        afterwards (`rillflow_fingerprints` of the changed tensors), and the `seconds` of each part."""
        with torch.no_grad():
            return self._rillflow_changed(paths, self._rillflow_write_whole)

    def rillflow_patch(self, paths: list[str]) -> dict[str, Any]:
        """Take over `name:value` at the places `name:index` of flat tensors; without an index, all of a tensor."""
        with torch.no_grad():
            return self._rillflow_changed(paths, self._rillflow_write_some)

    def rillflow_decode(self, steps: list[list[list[Any]]]) -> dict[str, Any]:
        """Decode and apply deltas, one step after the other. A step is a list of pieces: a file's path, the piece's
        first byte and its size there, and its parts (tensor, first weight, weights)."""
        with torch.no_grad():
            names = dict.fromkeys(name for step in steps for *_, parts in step for name, _, _ in parts)
            unknown = [name for name in names if name not in self.rillflow_facts]
            if unknown:
                raise ValueError(f"{unknown[0]} is not in the layout")
            began = time.perf_counter()
            for step in steps:
                _delta.apply_all(self._rillflow_pieces(step))
            return self._rillflow_read_back(list(names), "decode", began)

    def rillflow_fingerprints(self, names: list[str]) -> dict[str, Any]:
        """Return the sum of each part of these tensors that this rank holds, by its place."""
        with torch.no_grad():
            every = [(name, place) for name in names for place in self.rillflow_places[name]]
            found: dict[str, Any] = {name: [] for name in names}
            for (name, place), summed in zip(every, _sums([place for _, place in every]), strict=True):
                found[name].append([*_key(place), summed])
            return found

    # ------------------------------------------------------------ writing

    def _rillflow_changed(self, paths: list[str], write: Any) -> dict[str, Any]:
        entries = {entry: file for file in map(_File, paths) for entry in file.tensors}
        for entry in entries:
            self._rillflow_check(entry, entries)
        began = time.perf_counter()
        write(entries)
        names = list(dict.fromkeys(entry.rpartition(":")[0] or entry for entry in entries))
        return self._rillflow_read_back(names, "write", began)

    def _rillflow_read_back(self, names: list[str], what: str, began: float) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        written = time.perf_counter()
        held = self.rillflow_fingerprints(names)
        return {"held": held, "seconds": {what: written - began, "verify": time.perf_counter() - written}}

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
                _fill(place, file.read(name, place.held.device).reshape(-1))

    def _rillflow_write_some(self, entries: dict[str, _File]) -> None:
        for entry, file in entries.items():
            name, _, part = entry.rpartition(":")
            if part != "value":
                continue
            index = f"{name}:index"
            for place in self.rillflow_places[name]:
                device = place.held.device
                value = file.read(entry, device)
                if index not in entries:
                    _fill(place, value)
                elif _is_all(place, self.rillflow_facts[name][0]):
                    place.held.view(-1).index_copy_(0, entries[index].read(index, device).to(torch.int64), value)
                else:
                    _scatter(place, entries[index].read(index, device), value)

    # ------------------------------------------------------------ deltas

    def _rillflow_pieces(self, step: list[list[Any]]) -> Iterator[Any]:
        """Yield the pieces of a step with their weights: the parameters themselves, or copies that are stored back."""
        files: dict[str, memoryview] = {}
        for path, begin, size, parts in step:
            if path not in files:
                with open(path, "rb") as file:
                    files[path] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            data = files[path][begin : begin + size]
            flats = [self._rillflow_part(*part) for part in parts]
            if len(flats) == 1 and self._rillflow_in_place(parts[0][0]):
                yield _delta.Piece(flats[0], data)
            else:
                joined = torch.cat(flats)
                yield _delta.Piece(joined, data, partial(self._rillflow_store, joined, parts))

    def _rillflow_in_place(self, name: str) -> bool:
        """Return whether one run of this rank's memory is the whole tensor."""
        places = self.rillflow_places[name]
        return len(places) == 1 and _is_all(places[0], self.rillflow_facts[name][0])

    def _rillflow_whole(self, name: str) -> torch.Tensor:
        """All weights of a tensor, flat: the parameter itself where it is one run of memory, else a copy."""
        places, (shape, _) = self.rillflow_places[name], self.rillflow_facts[name]
        if self._rillflow_in_place(name):
            return places[0].held.view(-1)
        different = {(place.offset, place.size, place.stride): place for place in places}.values()
        if sum(math.prod(place.size) for place in different) < math.prod(shape):
            raise ValueError(f"this rank holds only a part of {name}: it cannot decode its delta")
        flat = places[0].held.new_empty(math.prod(shape))
        for place in different:
            flat.as_strided(place.size, place.stride, place.offset).copy_(place.held)
        return flat

    def _rillflow_part(self, name: str, first: int, weights: int) -> torch.Tensor:
        whole = self._rillflow_whole(name)
        if first + weights > len(whole):
            raise ValueError(f"a delta changes {first + weights} weights of {name}, which has {len(whole)}")
        return whole[first : first + weights]

    def _rillflow_store(self, joined: torch.Tensor, parts: list[Any]) -> None:
        at = 0
        for name, first, weights in parts:
            whole = self._rillflow_whole(name)
            whole[first : first + weights].copy_(joined[at : at + weights])
            if not self._rillflow_in_place(name):
                for place in self.rillflow_places[name]:
                    _fill(place, whole)
            at += weights


def _given(sources: dict[str, torch.Tensor], pieces: dict[str, list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a loader gets, by the names in a checkpoint."""
    for name, source in sources.items():
        if name not in pieces:
            yield name, source
        for piece, offset, size, stride in pieces.get(name, []):
            yield piece, source.as_strided(size, stride, offset)


# ---------------------------------------------------------------- one part


def _joined(places: list[Place]) -> list[Place]:
    """Return the parts, those joined that follow each other in the tensor as well as in the memory of this rank: a
    loader copies the experts of a stack one by one."""
    joined: list[Place] = []
    for place in sorted(places, key=lambda place: place.offset):
        last = joined[-1] if joined else None
        if last is not None and _follows(last, place):
            size = math.prod(last.size) + math.prod(place.size)
            joined[-1] = Place(last.offset, (size,), (1,), last.held.as_strided((size,), (1,)))
        else:
            joined.append(place)
    return joined


def _follows(last: Place, place: Place) -> bool:
    """Return whether the second part begins where the first one ends. Both must be one run of memory."""
    size = math.prod(last.size)
    runs = all(rows is not None and rows[0] == 1 for rows in (_rows(last, _WORD), _rows(place, _WORD)))
    return (
        runs
        and last.held.is_contiguous()
        and place.held.is_contiguous()
        and last.held.untyped_storage().data_ptr() == place.held.untyped_storage().data_ptr()
        and place.offset == last.offset + size
        and place.held.storage_offset() == last.held.storage_offset() + size
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors may have memory in common."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return max(_reach(one)[0], _reach(other)[0]) < min(_reach(one)[1], _reach(other)[1])


def _reach(held: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends."""
    first = int(held.storage_offset())
    return first, first + sum((size - 1) * step for size, step in zip(held.shape, held.stride(), strict=True)) + 1


def _fill(place: Place, flat: torch.Tensor) -> None:
    place.held.copy_(flat.as_strided(place.size, place.stride, flat.storage_offset() + place.offset))


def _is_all(place: Place, shape: tuple[int, ...]) -> bool:
    """Return whether the part is the whole tensor of this shape, in its own order."""
    rows = _rows(place, _WORD)
    in_order = place.offset == 0 and rows is not None and rows[0] == 1
    return in_order and math.prod(place.size) == math.prod(shape) and place.held.is_contiguous()


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
    begin, end = _reach(place.held)
    flat = place.held.as_strided((end - begin,), (1,))
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


def _sums(places: list[Place]) -> list[str]:
    """Return the share of each part in its tensor's fingerprint: see Rillflow's `weights.fingerprint`. Parts alike are
    computed at once, and a GPU is waited for at the end only: another process may run on it before it answers.
    """
    alike: dict[Any, list[int]] = {}
    for number, place in enumerate(places):
        rows = _rows(place, place.held.element_size())
        if rows is not None:
            alike.setdefault((rows, place.offset, place.held.dtype), []).append(number)
    order: list[int] = []
    sums: list[torch.Tensor] = []
    for (rows, offset, _), numbers in alike.items():
        words = -(-places[numbers[0]].held.nbytes // _WORD)
        at_once = max(1, _CHUNK // max(1, words))
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            sums.append(_summed([places[number].held for number in some], rows, offset))
            order += some
    found = [""] * len(places)
    for number, total in zip(order, torch.cat(sums).tolist() if sums else [], strict=True):
        found[number] = f"{total % 2**64:016x}"
    return found


def _summed(parts: list[torch.Tensor], shape: tuple[int, int, int], offset: int) -> torch.Tensor:
    """One sum for each of these parts, which are alike."""
    rows, _, ahead = shape
    itemsize = parts[0].element_size()
    data = torch.stack([_padded(held) for held in parts]) if len(parts) > 1 else _padded(parts[0])[None]
    words = data.view(torch.int64).view(len(parts), rows, -1)
    first, skip = offset * itemsize // _WORD, ahead * itemsize // _WORD
    total = words.new_zeros(len(parts))
    step = max(1, _CHUNK // max(1, words.shape[2]))
    for row in range(0, rows, step):
        for column in range(0, words.shape[2], _CHUNK):
            part = words[:, row : row + step, column : column + _CHUNK]
            number = torch.arange(part.shape[2], device=part.device) + (first + column)
            number = number + (torch.arange(row, row + part.shape[1], device=part.device) * skip)[:, None]
            total += _mixed(part + (number + 1) * _signed(_STEP)).sum((1, 2))
    return total


def _padded(held: torch.Tensor) -> torch.Tensor:
    """Its bytes, with zeros up to a whole word."""
    data = held.contiguous().reshape(-1).view(torch.uint8)
    tail = -len(data) % _WORD
    return torch.cat([data, data.new_zeros(tail)]) if tail else data


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
        self._there: dict[torch.device, torch.Tensor] = {}

    def facts(self, name: str) -> tuple[Any, tuple[int, ...]]:
        entry = self.tensors[name]
        return _DTYPES.get(entry["dtype"]), tuple(entry["shape"])

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """A small file travels as a whole, at the first tensor asked for; of a large one the tensors do."""
        entry = self.tensors[name]
        begin, end = (self._start + at for at in entry["data_offsets"])
        if len(self._data) <= _UPLOAD:
            if device not in self._there:
                self._there[device] = self._data.to(device)
            return self._view(self._there[device][begin:end], entry)
        return self._view(self._data[begin:end], entry).to(device, non_blocking=True)

    def _view(self, data: torch.Tensor, entry: Any) -> torch.Tensor:
        return data.view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _keep_weights_on_cpu() -> None:
    """vLLM's CPU build packs the weights of linear layers and experts into a form of its own and drops them. Then
    nothing could be changed in place, so there they stay as they are and are multiplied as they are."""
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return
    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def plain(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain  # type: ignore[attr-defined]
    experts = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = _apply_experts


def _apply_experts(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, **named: Any) -> None:
    """Compute the weighted sum of each token's experts, expert by expert."""
    if named["activation"].value != "silu" or self.w1_bias is not None or self.w2_bias is not None:
        raise ValueError("on a CPU, weights of experts are changed in place only with SiLU and without biases")
    chosen, weight = named["topk_ids"], named["topk_weights"]
    output.zero_()
    for expert in chosen.unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(hidden_states[row], named["w1"][expert]).chunk(2, -1)
        made = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, named["w2"][expert])
        output.index_add_(0, row, (made * weight[row, place, None]).to(output.dtype))


if os.environ.get("RILLFLOW_INSIDE") == "vllm":  # in its processes, not where this file is only read
    _keep_weights_on_cpu()
