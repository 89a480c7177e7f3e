"""Deltas read on the device. All tensors of a call go through the same few launches, batch by batch.

Invariants: no tensor is written before every delta of the call has been verified: checksum, table, every index, the
fingerprints of base and result. The base's is believed where the caller knows it; the result's follows from what
changed. A delta whose checksum is wrong raises CorruptData, whatever else is wrong.

The device begins with what needs the heads of the deltas alone. Meanwhile their bytes are copied and their checksums
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rillflow.contracts import Change
from rillflow.errors import CorruptData
from rillflow.weights.delta.format import DAMAGED, DENSE, RAW, Buffer, Layout
from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Shape, Work, alike, batches, in_turns, located, spans
from rillflow.weights.delta.gpu.fingerprint import fingerprint_gpu
from rillflow.weights.delta.gpu.found import Counted, Found, Records, Report, scatter, unpacked
from rillflow.weights.delta.gpu.incoming import Incoming

# The memory of a batch, by an estimate: eighths of a byte for each weight, if there are up to eight classes, and bytes
# for each byte of a delta. A changed weight takes some 18 bytes, and has most often some 0.8 bytes of a delta. And for
# each segment and eight classes, what its table may say. No batch has more weights than this either: what is counted in
# one has 32 bits.
_BUDGET = 1 << 30
_EIGHTHS_OF_WEIGHT, _OF_BYTE, _OF_SEGMENT = 5, 22, 1 << 14


Pieces = Sequence[tuple[torch.Tensor, Buffer]]


class _Slice(NamedTuple):
    """Changes of one tensor: their places and the new values."""

    places: torch.Tensor
    values: torch.Tensor


class _Job:
    """The tensors of one dtype, and the changes that are found. Those that are `odd` are not read by the kernels: they
    have raw segments, or very many classes."""

    def __init__(
        self, bases: list[torch.Tensor], deltas: heads.Deltas, checksums: heads.Checksums,
        known: Sequence[int] | None, layout: Layout,
    ) -> None:  # fmt: skip
        self.layout, self.shape, self.device = layout, Shape.of(layout), bases[0].device
        head = deltas.head
        self.bases, self.deltas, self.head, self.checksums = bases, deltas, head, checksums
        self._given, self.knows, self._checked = known, known is not None, False
        self.known: Array | None = None
        self.address, self._weights, self.copies = located(bases, layout.width // 8)
        self.spans = spans(self._weights, head["log2"].astype(np.int64))
        tensor = self.spans.tensor
        try:
            segments = deltas.segments(tensor, layout.exponents)
        except CorruptData:
            self.check()
            raise
        self.begin, self.sizes, self.limits = segments.begin, segments.size, segments.limits
        self.odd = np.zeros(len(bases), np.bool)
        strange = (segments.kind == RAW) | segments.many
        if strange.any():
            self.odd[tensor[strange]] = True
            self.limits[self.odd[tensor]] = 0
            self.sizes[self.odd[tensor]] = 0
        self.sums = np.zeros((len(bases), 2), np.uint64)
        self.found: list[Records] = []

    def check(self) -> None:
        """WeightsError unless all deltas are of these bases, as far as that is known before anything is computed: the
        first kernel need not wait for this."""
        if self._checked:
            return
        self._checked = True
        if self._given is not None:
            self.known = np.array(self._given, np.uint64)
        self._check_bases(self._weights, self.head["base"] if self.known is None else self.known)

    def _check_bases(self, weights: Array, prints: Array) -> None:
        """WeightsError unless all deltas are of such weights with such fingerprints."""
        head = self.head
        wrong = (head["dtype"] != self.layout.code) | (head["weights"] != weights.astype(np.uint64))
        wrong |= head["base"] != prints
        for number in np.flatnonzero(wrong).tolist():
            heads.header_of(head[number]).check_base(self.layout, int(weights[number]), int(prints[number]))

    def damaged(self) -> CorruptData:
        """What to raise: a wrong base looks like damage to those who believe it, so it is asked for first."""
        for base, head in zip(self.bases, self.head, strict=True):
            heads.header_of(head).check_base(self.layout, base.numel(), fingerprint_gpu(base))
        return CorruptData("a delta is damaged", DAMAGED)

    def verify(self) -> None:
        """The fingerprints of bases and results."""
        even = ~self.odd
        base = self.sums[:, 0] if self.known is None else self.known
        base = np.where(even, base, self.head["base"])
        self._check_bases(self.head["weights"].astype(np.int64), base)
        result = base + self.sums[:, 1]
        for number in np.flatnonzero(even & (result != self.head["result"])).tolist():
            heads.header_of(self.head[number]).check_result(int(result[number]))

    def batches(self) -> list[slice]:
        """Runs of segments that are decoded together."""
        classes = 1 + (self.limits[:, 2] > 7)
        costs = self.spans.weights * classes * _EIGHTHS_OF_WEIGHT // 8 + self.sizes * _OF_BYTE + classes * _OF_SEGMENT
        return batches(np.maximum(costs, self.spans.weights), _BUDGET)


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
    odd = [(job, number, _on_host(job, number)) for _, job in jobs for number in np.flatnonzero(job.odd).tolist()]
    for _, job in jobs:
        for records in job.found:
            scatter(records, job.shape)
        for number, copy in job.copies.items():
            if not job.odd[number]:
                _write(job.bases[number], Change(None, copy[: job.bases[number].numel()]))
    for job, number, change in odd:
        _write(job.bases[number], change)


def apply_gpu_(base: torch.Tensor, data: Buffer, known: int | None = None) -> torch.Tensor:
    """In place, after everything was verified."""
    apply_many_([(base, data)], None if known is None else [known])
    return base


def _jobs(pieces: Pieces, known: Sequence[int] | None) -> list[tuple[Sequence[int], _Job]]:
    """The verified changes of all tensors, dtype by dtype."""
    by_layout = alike([base for base, _ in pieces])
    deltas = heads.Deltas.of([data for _, data in pieces])
    parts = [deltas.part(numbers) for numbers in by_layout.values()]
    checksums = [heads.Checksums(part) for part in parts]
    try:
        jobs: list[tuple[Sequence[int], _Job]] = []
        for (layout, numbers), part, sums in zip(by_layout.items(), parts, checksums, strict=True):
            bases = [pieces[number][0] for number in numbers]
            theirs = known and [known[number] for number in numbers]
            jobs.append((numbers, _Job(bases, part, sums, theirs, layout)))
        in_turns([partial(_decode, job, part) for _, job in jobs for part in job.batches()])
        for _, job in jobs:
            job.verify()
    finally:
        # Also where something was raised: what was believed may be damaged, and that is then what is said.
        for sums in checksums:
            sums.wait()
    return jobs


def _change(job: _Job, number: int, slices: Sequence[_Slice]) -> Change:
    if job.odd[number]:
        return _on_host(job, number)
    base = job.bases[number]
    nothing = base.new_empty(0)
    index_K = torch.cat([nothing.long(), *(places for places, _ in slices)])
    value_K = torch.cat([nothing, *(values.view(nothing.dtype) for _, values in slices)])
    if len(index_K) <= DENSE * base.numel():
        return Change(index_K, value_K)
    whole = base.detach().reshape(-1).clone()
    whole[index_K] = value_K
    return Change(None, whole)


def _on_host(job: _Job, number: int) -> Change:
    """The same for what the kernels do not read."""
    from rillflow.weights.delta import decode

    index_K, value_K = decode(job.bases[number].detach().cpu(), job.deltas.view(number))
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
    some, limits, size, device = job.spans.part(part), job.limits[part], job.sizes[part], job.device
    classes = 8 if limits[:, 2].max() < 8 else 16
    counted = Counted(some, job.address, limits, classes, not job.knows, job.shape, device)
    incoming = Incoming(job.deltas, job.checksums, some, job.begin[part], size, device)
    job.check()
    yield incoming
    (ends,) = yield counted.read(incoming)
    if ends[0]:
        raise job.damaged()
    found = Found(ends, incoming.arrived(), counted)
    records, changes = found.records(), int(ends[3])
    landing = counted.reported()
    incoming.check()
    del counted, found, incoming  # none of which is needed while others take their turns
    report = Report.of(*(yield landing))
    # As many different places as there are changes, or they are not what the table says.
    if report.fault or report.changes != changes:
        raise job.damaged()
    job.found.append(records)
    first, _ = some.runs()
    job.sums[some.tensor[first]] += np.add.reduceat(report.sums.view(np.uint64), first)


def _split(job: _Job) -> list[list[_Slice]]:
    """Which of all changes belong to which tensor."""
    slices: list[list[_Slice]] = [[] for _ in job.bases]
    for records in job.found:
        places, values, starts = unpacked(records, job.shape, job.device)
        some = records.rows.spans
        for first, beyond in zip(*some.runs(), strict=True):
            here = slice(starts[first], starts[beyond])
            slices[some.tensor[first]].append(_Slice(places[here], values[here]))
    return slices
