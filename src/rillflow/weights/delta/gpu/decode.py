"""Deltas read on the device. All tensors of a call go through the same few launches, batch by batch.

Invariants: no tensor is written before every delta of the call has been verified: checksum, table, every index, the
fingerprints of base and result. The base's is believed where the caller knows it; the result's follows from what
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rillflow.contracts import Change
from rillflow.errors import CorruptData
from rillflow.weights.delta.format import DAMAGED, DENSE, RAW, Buffer, Header, Layout, layout_of, opened, segments
from rillflow.weights.delta.gpu import tables
from rillflow.weights.delta.gpu.batch import (
    Array,
    Landing,
    Rows,
    Shape,
    Spans,
    Work,
    batches,
    in_turns,
    spans,
    words_of,
)
from rillflow.weights.delta.gpu.fingerprint import fingerprint_gpu
from rillflow.weights.delta.gpu.found import Found, Records, counted, scatter, unpacked

# A batch has so many of: bytes of deltas, and sixteenths of all weights.
_BUDGET = 1 << 25
# So many bytes and more have their checksums computed by several threads, which needs no lock of the interpreter.
_MANY, _THREADS = 1 << 22, 4
_MASK = (1 << 64) - 1


Pieces = Sequence[tuple[torch.Tensor, Buffer]]
Opened = tuple[Header, memoryview]


class _Piece(NamedTuple):
    """One tensor and the header of its delta."""

    header: Header
    base: torch.Tensor
    words: torch.Tensor


class _Slice(NamedTuple):
    """Changes of one tensor: their places and the new values."""

    places: torch.Tensor
    values: torch.Tensor


class _Job:
    """The tensors of one dtype, and the changes that are found. `odd` are those that the kernels do not read: raw
    segments, very many classes."""

    def __init__(self, pieces: Pieces, heads: Sequence[Opened], known: Sequence[int] | None, layout: Layout) -> None:
        self.layout, self.shape, self.device = layout, Shape.of(layout), pieces[0][0].device
        self.known = known
        self.data = [data for _, data in pieces]
        self.odd: set[int] = set()
        self.pieces: list[_Piece] = []
        self.parts: list[memoryview] = []
        for number, ((base, _), (header, body)) in enumerate(zip(pieces, heads, strict=True)):
            header.check_base(layout, base.numel(), header.base if known is None else known[number])
            parts = list(segments(header, body))
            if any(kind == RAW for kind, _ in parts):
                self.odd.add(number)
                parts = [(kind, part[:0]) for kind, part in parts]
            self.pieces.append(_Piece(header, base, words_of(base)))
            self.parts += [part for _, part in parts]
        self.spans = spans(
            np.array([header.weights for header, _ in heads], np.int64),
            np.array([header.segment_log2 for header, _ in heads], np.int64),
        )
        self.sizes = np.array([len(part) for part in self.parts], np.int64)
        self.addresses = np.array([piece.words.data_ptr() for piece in self.pieces], np.int64)
        self.sums = np.zeros((len(pieces), 2), np.uint64)
        self.found: list[Records] = []

    def rows(self, some: Spans, classes: int, limits: Array) -> Rows:
        return Rows(some, self.addresses, self.addresses, self.shape, classes, self.device, limits)

    def damaged(self, number: int | None = None) -> CorruptData:
        """What to raise: a wrong base looks like damage to those who believe it, so it is asked for first."""
        for piece in self.pieces if number is None else [self.pieces[number]]:
            piece.header.check_base(self.layout, piece.base.numel(), fingerprint_gpu(piece.base))
        return CorruptData("a delta is damaged", DAMAGED)

    def verify(self) -> None:
        for number, (piece, (full, gained)) in enumerate(zip(self.pieces, self.sums.tolist(), strict=True)):
            if number not in self.odd:
                base = full if self.known is None else self.known[number]
                piece.header.check_base(self.layout, piece.base.numel(), base)
                piece.header.check_result((base + gained) & _MASK)


def decode_many(pieces: Pieces, known: Sequence[int] | None = None) -> list[Change]:
    """What each delta changes of its tensor; all tensors are on one device and none of them is touched.

    `known` are the fingerprints of the tensors, if the caller has them: they are believed.
    """
    found: dict[int, Change] = {}
    for numbers, job in _jobs(pieces, known):
        slices = _split(job)
        for place, number in enumerate(numbers):
            found[number] = _change(job, place, slices[place])
    return [found[number] for number in range(len(pieces))]


def decode_gpu(base: torch.Tensor, data: Buffer, known: int | None = None) -> Change:
    """What the delta changes of `base`, of which `known` is the fingerprint, if the caller has it."""
    return decode_many([(base, data)], None if known is None else [known])[0]


def apply_many_(pieces: Pieces, known: Sequence[int] | None = None) -> None:
    """All deltas in place, or none of them: then it raises."""
    jobs = _jobs(pieces, known)
    odd = [(job, number, _on_host(job, number)) for _, job in jobs for number in sorted(job.odd)]
    for _, job in jobs:
        for records in job.found:
            scatter(records, job.shape)
        for number, piece in enumerate(job.pieces):
            if number not in job.odd and piece.words is not piece.base:
                _write(piece.base, Change(None, piece.words[: piece.base.numel()]))
    for job, number, change in odd:
        _write(job.pieces[number].base, change)


def apply_gpu_(base: torch.Tensor, data: Buffer, known: int | None = None) -> torch.Tensor:
    """In place, after everything was verified."""
    apply_many_([(base, data)], None if known is None else [known])
    return base


def _jobs(pieces: Pieces, known: Sequence[int] | None) -> list[tuple[list[int], _Job]]:
    """The verified changes of all tensors, dtype by dtype."""
    by_layout: dict[Layout, list[int]] = {}
    for number, (base, _) in enumerate(pieces):
        by_layout.setdefault(layout_of(base), []).append(number)
    heads = _opened([data for _, data in pieces])
    jobs: list[tuple[list[int], _Job]] = []
    for layout, numbers in by_layout.items():
        mine, theirs = [pieces[number] for number in numbers], [heads[number] for number in numbers]
        jobs.append((numbers, _Job(mine, theirs, known and [known[number] for number in numbers], layout)))
    for _, job in jobs:
        costs = job.sizes + job.spans.weights // 16
        in_turns([partial(_decode, job, part) for part in batches(costs, _BUDGET)])
        job.verify()
    return jobs


def _opened(deltas: Sequence[Buffer]) -> list[Opened]:
    """`opened` of each."""
    if sum(map(len, deltas)) < _MANY:
        return [opened(data) for data in deltas]
    with ThreadPoolExecutor(_THREADS) as pool:
        shares = list(pool.map(lambda k: [opened(data) for data in deltas[k::_THREADS]], range(_THREADS)))
    return [shares[number % _THREADS][number // _THREADS] for number in range(len(deltas))]


def _change(job: _Job, number: int, slices: Sequence[_Slice]) -> Change:
    if number in job.odd:
        return _on_host(job, number)
    piece = job.pieces[number]
    nothing = piece.base.new_empty(0)
    index_K = torch.cat([nothing.long(), *(places for places, _ in slices)])
    value_K = torch.cat([nothing, *(values.view(nothing.dtype) for _, values in slices)])
    if len(index_K) <= DENSE * piece.base.numel():
        return Change(index_K, value_K)
    whole = piece.base.detach().reshape(-1).clone()
    whole[index_K] = value_K
    return Change(None, whole)


def _on_host(job: _Job, number: int) -> Change:
    """The same for what the kernels do not read."""
    from rillflow.weights.delta import decode

    index_K, value_K = decode(job.pieces[number].base.detach().cpu(), job.data[number])
    return Change(None if index_K is None else index_K.to(job.device), value_K.to(job.device))


def _write(base: torch.Tensor, change: Change) -> None:
    with torch.no_grad():
        if change.index_K is None:
            base.copy_(change.value_K.view(base.shape))
        else:
            flat = base.reshape(-1)
            flat[change.index_K] = change.value_K
            if flat.data_ptr() != base.data_ptr():
                base.copy_(flat.view(base.shape))


def _decode(job: _Job, part: slice) -> Work:
    """One batch. Yields where it waits for numbers."""
    shape, device = job.shape, job.device
    some, parts, size = job.spans.part(part), job.parts[part], job.sizes[part]
    begin = np.cumsum(size) - size
    # Whole words, and one more than there are.
    buffer = torch.empty(int(size.sum()) // 4 + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer[-2:] = 0
    bytes_here = buffer.numpy().view(np.uint8)
    for start, piece in zip(begin, parts, strict=True):
        bytes_here[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    host_limits, state = tables.read_limits(bytes_here, begin, size, job.layout.exponents)
    if not state.all():
        raise job.damaged()
    if (state == 2).any():
        size = _without(job, some, state, host_limits, size)
    classes = 8 if host_limits[:, 2].max() < 8 else 16
    rows = job.rows(some, classes, host_limits)
    data = buffer.to(device, non_blocking=True)
    counts = counted(rows, classes, job.known is None, shape, device)
    (group_sizes,) = yield Landing(torch.diff(counts.sizes[rows.group_starts]))
    plans = tables.read(bytes_here, begin, size, group_sizes.reshape(-1, classes), host_limits[:, 2], shape.WIDTH)
    if plans is None:
        raise job.damaged()
    found = Found(plans, data, counts, shape, device)
    records = found.records()
    landing = Landing(found.fault, counts.sums, records.runs[-1:], *found.unary_seen)
    del counts, found, data  # none of which is needed while others take their turns
    fault, sums_here, number, *unary = yield landing
    # As many different places as there are changes, or they are not what the table says.
    if fault or number[0] != plans.changes_from[-1] or not plans.unary_fits(*unary):
        raise job.damaged()
    job.found.append(records)
    np.add.at(job.sums, some.tensor, sums_here.view(np.uint64))


def _without(job: _Job, some: Spans, state: Array, starts: Array, size: Array) -> Array:
    """Leave out the tensors of which a segment has too many classes: they are read on the host."""
    job.odd |= set(some.tensor[state == 2].tolist())
    out = np.isin(some.tensor, list(job.odd))
    starts[out] = -1, -1, 0
    return np.where(out, 0, size)


def _split(job: _Job) -> list[list[_Slice]]:
    """Which of all changes belong to which tensor."""
    slices: list[list[_Slice]] = [[] for _ in job.pieces]
    for records in job.found:
        places, values = unpacked(records, job.shape)
        starts = [*records.runs[records.rows.on_device[:, 4]].tolist(), len(places)]
        some = records.rows.spans
        for first, beyond in some.runs():
            here = slice(starts[first], starts[beyond])
            slices[some.tensor[first]].append(_Slice(places[here], values[here]))
    return slices
