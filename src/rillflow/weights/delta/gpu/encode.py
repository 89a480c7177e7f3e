"""Deltas made on the device. All tensors of a call go through the same few launches, batch by batch.

What a batch costs in memory is about 6 bytes a weight and some tens for each changed one: an estimate from a sample
decides how many segments it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from rillflow.weights.delta.format import (
    CODED,
    MOST_LOG2,
    RAW,
    SAME,
    Buffer,
    Encoded,
    Header,
    Layout,
    layout_of_pair,
    sealed,
    segment_head,
)
from rillflow.weights.delta.gpu import compare, tables
from rillflow.weights.delta.gpu.batch import Array, Landing, Rows, Shape, Work, batches, in_turns, spans, words_of
from rillflow.weights.delta.gpu.written import CLASSES, Batch, Landed

# Of each segment, 64 runs of up to so many words are looked at before its classes are chosen.
_RUN, _SHARES, _RUNS, _ROUNDS = 256, 64, 4, 2
_BINS, _SYMBOLS = compare.BINS.value, compare.SYMBOLS.value
# A batch has so many of: changed weights, and sixteenths of all weights.
_BUDGET = 1 << 25
_MASK = (1 << 64) - 1


class _Job:
    """The tensors of one dtype, and the deltas that come of them."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[int] | None, layout: Layout
    ) -> None:
        self.layout, self.shape, self.device = layout, Shape.of(layout), pairs[0][0].device
        self.words = [(words_of(base), words_of(new)) for base, new in pairs]
        self.known = known
        self.weights = [base.numel() for base, _ in pairs]
        self.old = np.array([old.data_ptr() for old, _ in self.words], np.int64)
        self.new = np.array([new.data_ptr() for _, new in self.words], np.int64)
        self.spans = spans(np.array(self.weights, np.int64), MOST_LOG2)
        self.segments: list[dict[int, list[Buffer]]] = [{} for _ in pairs]
        self.sums = np.zeros((len(pairs), 2), np.uint64)
        self.changed = np.zeros(len(pairs), np.int64)
        self.done: dict[int, Encoded] = {}
        for number, weights in enumerate(self.weights):
            if not weights:
                self._seal(number)

    def rows(self, part: slice) -> Rows:
        return Rows(self.spans.part(part), self.old, self.new, self.shape, CLASSES, self.device)

    def count(self, rows: Rows, totals: Array, changed: Array) -> None:
        """What a batch's segments add to the fingerprints, and how many of their weights changed."""
        np.add.at(self.sums, rows.spans.tensor, totals[:, :2].view(np.uint64))
        np.add.at(self.changed, rows.spans.tensor, changed)

    def add(self, rows: Rows, segments: Iterable[list[Buffer]]) -> None:
        """The bytes of a batch's segments, which are counted; a tensor's last one makes its delta."""
        for number, start, pieces in zip(rows.spans.tensor.tolist(), rows.spans.start.tolist(), segments, strict=True):
            self.segments[number][start] = pieces
            if len(self.segments[number]) == -(-self.weights[number] >> MOST_LOG2):
                self._seal(number)

    def _seal(self, number: int) -> None:
        full, gained = self.sums[number].tolist()
        base = full if self.known is None else self.known[number]
        result = (base + gained) & _MASK
        header = Header(self.layout.code, MOST_LOG2, self.weights[number], base, result)
        parts = self.segments[number]
        data = sealed(header, [piece for start in sorted(parts) for piece in parts[start]])
        self.done[number] = Encoded(data, base, result, int(self.changed[number]))
        self.segments[number] = {}


def encode_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[int] | None = None
) -> list[Encoded]:
    """The deltas that make each second tensor of the first; all of them are on one device.

    `known` are the fingerprints of the first ones, if the caller has them: it saves a pass over them.
    """
    by_layout: dict[Layout, list[int]] = {}
    for number, (base, new) in enumerate(pairs):
        by_layout.setdefault(layout_of_pair(base, new), []).append(number)
    found: dict[int, Encoded] = {}
    for layout, numbers in by_layout.items():
        job = _Job([pairs[number] for number in numbers], known and [known[number] for number in numbers], layout)
        if len(job.spans):
            choices = _choose(job)
            costs = choices[:, 3].cpu().numpy() + job.spans.weights // 16
            in_turns([partial(_encode, job, choices, part) for part in batches(costs, _BUDGET)])
        found |= {number: job.done[place] for place, number in enumerate(numbers)}
    return [found[number] for number in range(len(pairs))]


def encode_gpu(base: torch.Tensor, new: torch.Tensor, known: int | None = None) -> Encoded:
    """The delta that makes `new` of `base`, of which `known` is the fingerprint, if the caller has it."""
    return encode_many([(base, new)], None if known is None else [known])[0]


def _choose(job: _Job) -> torch.Tensor:
    """A row of each segment: see `compare.choose`."""
    rows, count, device = job.rows(slice(None)), len(job.spans), job.device
    histogram = torch.zeros(count * _BINS * _SYMBOLS, dtype=torch.int32, device=device)
    lowest = torch.empty(count, dtype=torch.int32, device=device)
    compare.sample[(count, _SHARES // (_RUNS * _ROUNDS))](
        rows.on_device, histogram, lowest, WORDS=_RUN, RUNS=_RUNS, SHARES=_SHARES, ROUNDS=_ROUNDS, **job.shape.all
    )
    scratch = torch.empty(count * CLASSES * _BINS, dtype=torch.int32, device=device)
    choices = torch.empty((count, 4), dtype=torch.int64, device=device)
    compare.choose[(count,)](rows.on_device, histogram, lowest, scratch, choices, CLASSES=CLASSES)
    return choices


def _encode(job: _Job, choices: torch.Tensor, part: slice) -> Work:
    """One batch, to the bytes of its segments. Yields where it waits for numbers."""
    rows = job.rows(part)
    batch = Batch(rows, choices[part], job.shape)
    (numbers,) = yield batch.compare(known=job.known is not None)
    if numbers[0]:
        (numbers,) = yield batch.plan(*map(int, numbers))
        landed = Landed(*(yield batch.write(*map(int, numbers))))
        changed = np.diff(landed.changes_from[::CLASSES])
        job.count(rows, landed.totals, changed)
        job.add(rows, _segments(job, rows, changed, landed))
        return
    (totals,) = yield Landing(batch.totals)
    job.count(rows, totals, np.zeros(len(totals), np.int64))
    job.add(rows, [[segment_head(SAME, 0)]] * len(totals))


def _segments(job: _Job, rows: Rows, changed: Array, landed: Landed) -> Iterator[list[Buffer]]:
    """The bytes of a batch's segments."""
    total, members, kinds = landed.table.reshape(3, len(rows.spans), CLASSES, 2 * job.shape.WIDTH)
    table, sizes = tables.write(landed.choices[:, 0], landed.choices[:, 2], total, members, kinds, job.shape.WIDTH)
    streams = landed.streams.view(np.uint8).data
    fields_at, end = _bytes(landed.totals[:, 2], 0)
    unary_at, _ = _bytes(landed.totals[:, 3], end)
    for s, weights in enumerate(rows.spans.weights.tolist()):
        stream, field = streams[unary_at[s]], streams[fields_at[s]]
        head = table[s, : sizes[s]].tobytes() + len(stream).to_bytes(4, "little")
        size = len(head) + len(stream) + len(field)
        if not changed[s]:
            yield [segment_head(SAME, 0)]
        elif size < weights * job.layout.width // 8:
            yield [segment_head(CODED, size) + head, stream, field]
        else:
            yield _raw(job, rows, s)


def _bytes(bits: Array, begin: int) -> tuple[list[slice], int]:
    """Where each stream is, which begins at the word after the last one of the stream before; and where they end."""
    found = []
    for size in bits.tolist():
        found.append(slice(begin, begin + (size + 7) // 8))
        begin += (size + 31) // 32 * 4
    return found, begin


def _raw(job: _Job, rows: Rows, s: int) -> list[Buffer]:
    tensor, start, weights = (int(column[s]) for column in (rows.spans.tensor, rows.spans.start, rows.spans.weights))
    flat = job.words[tensor][1].detach().reshape(-1)
    data = flat[start : start + weights].cpu().view(torch.uint8).numpy().tobytes()
    return [segment_head(RAW, len(data)), data]
