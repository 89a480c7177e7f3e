"""Weights of a running server, changed in place and verified: a worker extension of vLLM (`--worker-extension-cls`),
and what SGLang's custom weight loader calls.

`rillflow_places` tells where a published tensor lives in the server's own parameters. Invariants: weights keep their
storage, so that captured graphs stay valid; nothing is written before the names, sizes and dtypes of all that comes
were checked; fingerprints are sums over what a rank really holds, read after it was written.

Imports only the standard library, torch, numpy and what lies beside it: it runs in the server's environment, not in
Rillflow's.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

# Inside a server this folder is on the path; in Rillflow it is part of a package.
_adapters, _delta, _logprobs, _places = (
    importlib.import_module(f"{__package__}.{name}" if __package__ else name)
    for name in ("rillflow_adapters", "rillflow_delta", "rillflow_logprobs", "rillflow_places")
)

_PATIENCE = 30.0  # seconds for a step that is still being decoded when it is due
_AHEAD = 256 << 20  # bytes of new weights that are kept until they are written
_UPLOAD = 256 << 20  # bytes of a file that is copied to the device in one go
_PEFT = re.compile(r"^base_model\.model\.|\.weight$")  # what peft adds to the names of an adapter's tensors
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32}


class RillflowWorker:
    """Joined to vLLM's worker class; its methods are called through `collective_rpc` with plain arguments."""

    rillflow_ahead: _Ahead | None = None
    rillflow_announced = 0

    def rillflow_layout(
        self, shapes: dict[str, list[int]], dtype: str, pieces: dict[str, list[Any]] | None = None
    ) -> dict[str, Any]:
        """Learn where tensors of these names and shapes live. Answers, for each, how it is spread on this rank. The
        loader gets those that have `pieces` (name, offset, size, stride) piece by piece."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        wanted = getattr(torch, dtype)
        sources = {name: torch.empty(shape, dtype=wanted, device="meta") for name, shape in shapes.items()}
        recorder = _places.Recorder(sources, model)
        with _adapters.unwrapped(model), recorder, torch.no_grad():
            model.load_weights(_given(sources, pieces or {}))  # type: ignore[operator]
        recorder.places = {name: _places.join(places) for name, places in recorder.places.items()}
        self.rillflow_places = recorder.places
        self.rillflow_facts = {name: (tuple(shape), wanted) for name, shape in shapes.items()}
        held = {place.held.untyped_storage().data_ptr() for places in recorder.places.values() for place in places}
        every = [(name, place) for name, places in recorder.places.items() for place in places]
        return {
            "spread": {name: [_places.key(place) for place in places] for name, places in recorder.places.items()},
            "devices": sorted({place.held.device.type for _, place in every}),
            "other_dtype": sorted({name for name, place in every if place.held.dtype is not wanted}),
            "unaligned": sorted({name for name, place in every if _places.rows_of(place, wanted.itemsize) is None}),
            "uncovered": sorted(
                name
                for name, parameter in model.named_parameters()
                if parameter.numel() and parameter.untyped_storage().data_ptr() not in held
            ),
            "adapters": _adapters.capacity(model),
        }

    def rillflow_adapter(self, number: int, path: str) -> list[str]:
        """Return the layers that do not hold their part of the adapter of this number; `path` is its safetensors
        file."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        file = _File(path)
        with torch.no_grad():
            tensors = {_PEFT.sub("", name): file.read(name, torch.device("cpu")) for name in file.tensors}
            wrong: list[str] = _adapters.wrong_layers(model, number, tensors)
        return wrong

    def rillflow_return_raw_logprobs(self) -> None:
        """Let vLLM's sampler return the model's own log-probs too, where a request asks for them."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.sampler is not None and not isinstance(runner.sampler, _logprobs.VllmSampler):
            runner.sampler = _logprobs.VllmSampler(runner.sampler)

    def rillflow_announce(self, version: int) -> None:
        """The next weights that are written are of this version."""
        self.rillflow_announced = version

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
            self._rillflow_begin_version()
            ahead, self.rillflow_ahead = self.rillflow_ahead, None
            changes = ahead.changes() if ahead is not None and ahead.steps == steps else None
            if changes is not None:
                _delta.make(changes)
            else:
                for step in steps:
                    _delta.apply_all(self._rillflow_pieces(step))
            return self._rillflow_read_back(list(names), "decode", began)

    def rillflow_prepare(self, steps: list[list[list[Any]]]) -> bool:
        """Decode a step beside sampling, for `rillflow_decode` of the same step. Answers at once whether that has
        ended: ask again until it has. Several steps are not decoded ahead: each needs the weights of the one before."""
        ahead = self.rillflow_ahead
        if ahead is None or ahead.steps != steps:
            known = all(name in self.rillflow_facts for step in steps for *_, parts in step for name, _, _ in parts)
            if len(steps) != 1 or not known:
                return True
            ahead = self.rillflow_ahead = _Ahead(steps, self._rillflow_pieces(steps[0]))
        return ahead.ended()

    def rillflow_fingerprints(self, names: list[str]) -> dict[str, Any]:
        """Return the sum of each part of these tensors that this rank holds, by its place."""
        with torch.no_grad():
            every = [(name, place) for name in names for place in self.rillflow_places[name]]
            found: dict[str, Any] = {name: [] for name in names}
            for (name, place), summed in zip(every, _places.sums_of([place for _, place in every]), strict=True):
                found[name].append([*_places.key(place), summed])
            return found

    # ------------------------------------------------------------ writing

    def _rillflow_changed(self, paths: list[str], write: Any) -> dict[str, Any]:
        entries = {entry: file for file in map(_File, paths) for entry in file.tensors}
        for entry in entries:
            self._rillflow_check(entry, entries)
        began = time.perf_counter()
        self._rillflow_begin_version()
        self.rillflow_ahead = None  # it was decoded from weights that are no more
        write(entries)
        names = list(dict.fromkeys(entry.rpartition(":")[0] or entry for entry in entries))
        return self._rillflow_read_back(names, "write", began)

    def _rillflow_begin_version(self) -> None:
        """Mark the tokens from here on with the announced version: no step runs before this call has ended."""
        sampler = getattr(self.model_runner, "sampler", None)  # type: ignore[attr-defined]
        if isinstance(sampler, _logprobs.VllmSampler):
            sampler.version = self.rillflow_announced

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
                _places.fill(place, file.read(name, place.held.device).reshape(-1))

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
                    _places.fill(place, value)
                elif _places.is_all(place, self.rillflow_facts[name][0]):
                    place.held.view(-1).index_copy_(0, entries[index].read(index, device).to(torch.int64), value)
                else:
                    _places.scatter(place, entries[index].read(index, device), value)

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
        return len(places) == 1 and _places.is_all(places[0], self.rillflow_facts[name][0])

    def _rillflow_whole(self, name: str) -> torch.Tensor:
        """All weights of a tensor, flat: the parameter itself where it is one run of memory, else a copy."""
        places, (shape, _) = self.rillflow_places[name], self.rillflow_facts[name]
        held: torch.Tensor = places[0].held
        if self._rillflow_in_place(name):
            return held.view(-1)
        different = {(place.offset, place.size, place.stride): place for place in places}.values()
        if sum(math.prod(place.size) for place in different) < math.prod(shape):
            raise ValueError(f"this rank holds only a part of {name}: it cannot decode its delta")
        flat = held.new_empty(math.prod(shape))
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
                    _places.fill(place, whole)
            at += weights


class _Ahead:
    """The changes of one step of deltas, decoded by a thread with a stream of its own."""

    def __init__(self, steps: list[Any], pieces: Iterator[Any]) -> None:
        self.steps = steps
        self._changes: list[Any] | None = None
        # Made here: a new thread would make it on the first device, not on this worker's.
        self._stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._decode, args=(pieces,), name="rillflow-decode", daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def changes(self) -> list[Any] | None:
        """Return the changes; None if they could not be decoded in time, or not kept in memory, beside sampling."""
        self._thread.join(_PATIENCE)
        return self._changes

    def _decode(self, pieces: Iterator[Any]) -> None:
        # A step that fails here is decoded again after the cut, where there is more memory and errors are reported.
        with suppress(Exception), torch.no_grad(), torch.cuda.stream(self._stream):
            changes, size = [], 0
            for batch in _delta.decoded(pieces):
                changes += batch
                size += sum(change.new_K.nbytes for change in batch if change.new_K is not change.bits_N)
                if size > _AHEAD:
                    return
            if self._stream is not None:
                self._stream.synchronize()
            self._changes = changes


def _given(sources: dict[str, torch.Tensor], pieces: dict[str, list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a loader gets, by the names in a checkpoint."""
    for name, source in sources.items():
        if name not in pieces:
            yield name, source
        for piece, offset, size, stride in pieces.get(name, []):
            yield piece, source.as_strided(size, stride, offset)


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
