"""Where published tensors live in a server's own parameters, and the sums that prove what is there.

A model's own loader is asked to load tensors without data, and its copies are recorded instead of made: that tells
where fused projections, shards of tensor parallel ranks and tied heads keep their weights.

Imports only the standard library and torch: it runs in the server's environment, not in Rillflow's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_STEP, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 8
_CHUNK = 1 << 22  # words that are hashed at once: bounds the memory of it


class Place(NamedTuple):
    """A part of a published tensor, by its flat place there, and the storage of this rank that holds it."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    held: torch.Tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def join(places: list[Place]) -> list[Place]:
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
    runs = all(rows is not None and rows[0] == 1 for rows in (rows_of(last, _WORD), rows_of(place, _WORD)))
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


def fill(place: Place, flat: torch.Tensor) -> None:
    place.held.copy_(flat.as_strided(place.size, place.stride, flat.storage_offset() + place.offset))


def is_all(place: Place, shape: tuple[int, ...]) -> bool:
    """Return whether the part is the whole tensor of this shape, in its own order."""
    rows = rows_of(place, _WORD)
    in_order = place.offset == 0 and rows is not None and rows[0] == 1
    return in_order and math.prod(place.size) == math.prod(shape) and place.held.is_contiguous()


def scatter(place: Place, index: torch.Tensor, value: torch.Tensor) -> None:
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


def rows_of(place: Place, itemsize: int) -> tuple[int, int, int] | None:
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


def key(place: Place) -> list[Any]:
    return [place.offset, list(place.size), list(place.stride)]


def sums_of(places: list[Place]) -> list[str]:
    """Return the share of each part in its tensor's fingerprint: see Rillflow's `weights.fingerprint`. Parts alike are
    computed at once, and a GPU is waited for at the end only: another process may run on it before it answers.
    """
    alike: dict[Any, list[int]] = {}
    for number, place in enumerate(places):
        rows = rows_of(place, place.held.element_size())
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
