"""Deltas made on the device. All tensors of a call go through the same few launches, batch by batch.

What a batch costs in memory is about 4 bytes a weight and some tens for each changed one: an estimate from a sample
decides how many segments it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

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
from rillflow.weights.delta.gpu import compare, streams, tables
from rillflow.weights.delta.gpu.batch import (
    BLOCK,
    Array,
    Landing,
    Rows,
    Shape,
    Span,
    Work,
    exclusive,
    in_turns,
    spans,
    words_of,
)

_CLASSES = 8
# Of each segment, 64 runs of up to a block are looked at before its classes are chosen.
_SHARES, _ROUNDS = 64, 8
_BINS, _SYMBOLS = compare.BINS.value, compare.SYMBOLS.value
_CELLS, _SORTED, _CHUNK = 64, 128, 1024
# A batch has so many of: changed weights, and sixteenths of all weights.
_BUDGET = 1 << 24
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
        self.spans = [span for number, weights in enumerate(self.weights) for span in spans(number, weights)]
        self.segments: list[dict[int, list[Buffer]]] = [{} for _ in pairs]
        self.sums = np.zeros((len(pairs), 2), np.uint64)
        self.changed = np.zeros(len(pairs), np.int64)
        self.done: dict[int, Encoded] = {}
        for number, weights in enumerate(self.weights):
            if not weights:
                self._seal(number)

    def rows(self, some: list[Span]) -> Rows:
        return Rows(some, self.old, self.new, self.shape, self.device)

    def add(self, span: Span, pieces: list[Buffer], sums: Array, changed: int) -> None:
        """The bytes of one segment; the tensor's last one makes its delta."""
        self.segments[span.tensor][span.start] = pieces
        self.sums[span.tensor] += sums.view(np.uint64)
        self.changed[span.tensor] += changed
        if len(self.segments[span.tensor]) == -(-self.weights[span.tensor] // (1 << MOST_LOG2)):
            self._seal(span.tensor)

    def _seal(self, number: int) -> None:
        full, gained = (int(value) for value in self.sums[number])
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
        if job.spans:
            choices = _choose(job)
            estimates = choices[:, 3].cpu().numpy()
            in_turns([partial(_encode, job, choices, part) for part in _batches(job.spans, estimates)])
        found |= {number: job.done[place] for place, number in enumerate(numbers)}
    return [found[number] for number in range(len(pairs))]


def encode_gpu(base: torch.Tensor, new: torch.Tensor, known: int | None = None) -> Encoded:
    """The delta that makes `new` of `base`, of which `known` is the fingerprint, if the caller has it."""
    return encode_many([(base, new)], None if known is None else [known])[0]


def _choose(job: _Job) -> torch.Tensor:
    """A row of each segment: see `compare.choose`."""
    rows, count, device = job.rows(job.spans), len(job.spans), job.device
    histogram = torch.zeros(count * _BINS * _SYMBOLS, dtype=torch.int32, device=device)
    lowest = torch.empty(count, dtype=torch.int32, device=device)
    compare.sample[(count, _SHARES // _ROUNDS)](
        rows.on_device, histogram, lowest, WORDS=BLOCK, SHARES=_SHARES, ROUNDS=_ROUNDS, **job.shape.all, num_warps=8
    )
    scratch = torch.empty(count * _CLASSES * _BINS, dtype=torch.int32, device=device)
    choices = torch.empty((count, 4), dtype=torch.int64, device=device)
    compare.choose[(count,)](rows.on_device, histogram, lowest, scratch, choices, CLASSES=_CLASSES)
    return choices


def _batches(spans: list[Span], estimates: Array) -> list[slice]:
    """Runs of segments that fit a batch; at least one each."""
    found, start, cost = [], 0, 0
    for number, span in enumerate(spans):
        mine = int(estimates[number]) + span.weights // 16
        if number > start and cost + mine > _BUDGET:
            found.append(slice(start, number))
            start, cost = number, 0
        cost += mine
    return [*found, slice(start, len(spans))]


def _encode(job: _Job, choices: torch.Tensor, part: slice) -> Work:
    """One batch, to the bytes of its segments. Yields where it waits for numbers."""
    shape, device = job.shape, job.device
    rows = job.rows(job.spans[part])
    choices = choices[part]
    count, groups, columns = len(rows.spans), len(rows.spans) * _CLASSES, 2 * shape.WIDTH
    ints = partial(torch.empty, dtype=torch.int32, device=device)
    owner, emitted, sizes, changes = (
        rows.owner(),
        ints(rows.count),
        ints(rows.count * _CLASSES),
        ints(rows.count * _CLASSES),
    )
    sums = torch.zeros((count, 2), dtype=torch.int64, device=device)
    records = torch.empty(
        rows.count * BLOCK * shape.LANES, dtype=torch.int32 if shape.WIDTH == 16 else torch.int64, device=device
    )
    cells = torch.empty(rows.count * (BLOCK // 4) * 3, dtype=torch.int64, device=device)
    compare.compare[(rows.count,)](
        rows.on_device, owner, choices, cells, records, emitted, sizes, changes, sums, WORDS=BLOCK, CHUNK=_CELLS,
        CLASSES=_CLASSES, **shape.all,
    )  # fmt: skip
    del cells
    if job.known is None:
        compare.total[(rows.count,)](rows.on_device, owner, sums, WORDS=BLOCK, LANES=shape.LANES)
    # Groups: how many weights, how many changes, which of them are coded.
    sizes, changes, at = exclusive(sizes), exclusive(changes), rows.group_starts(_CLASSES)
    changes_from = changes[at]
    group_sizes, changed = torch.diff(sizes[at]), torch.diff(changes_from)
    others = (choices[:, 1:2] >> 8 * torch.arange(_CLASSES, device=device) & 1).reshape(-1)
    modes = torch.where((changed > 0) & (changed < group_sizes), 1 + others, 0).int()
    events_from = exclusive(torch.where(modes == 2, group_sizes - changed, changed) * (modes > 0), torch.int64)
    chunks_from = exclusive((changed + _CHUNK - 1) // _CHUNK, torch.int32)
    ((changed_all, events_all, chunks_all),) = yield Landing(
        torch.stack([changes_from[-1].long(), events_from[-1], chunks_from[-1].long()])
    )
    changed_all, events_all, chunks_all = int(changed_all), int(events_all), int(chunks_all)
    if not changed_all:
        (sums_here,) = yield Landing(sums)
        for span, sum_here in zip(rows.spans, sums_here, strict=True):
            job.add(span, [segment_head(SAME, 0)], sum_here, 0)
        return
    ordered = ints(changed_all)
    positions = torch.empty(events_all, dtype=torch.int64, device=device)
    compare.sort[(rows.count,)](
        rows.on_device, owner, records, emitted, sizes, changes, modes, events_from, ordered, positions, WORDS=BLOCK,
        CLASSES=_CLASSES, CHUNK=_SORTED, **shape.bits,
    )  # fmt: skip
    del records
    # Signs and lengths: counts by chunk, then everything that the tables say.
    chunk_owner = torch.repeat_interleave(torch.diff(chunks_from), output_size=chunks_all)
    counts = torch.zeros(columns * chunks_all, dtype=torch.int32, device=device)
    chunk = (chunk_owner, chunks_from, changes_from, ordered)
    streams.count[(chunks_all,)](*chunk, counts, chunks_all, CHUNK=_CHUNK, WIDTH=shape.WIDTH)
    counts = exclusive(counts)
    total, members, kinds, coded, bits, most = ints((6, groups * columns)).unbind()
    streams.plan[(groups,)](
        group_sizes, changes_from, chunks_from, modes, counts, chunks_all, total, members, kinds, coded, bits, most,
        WIDTH=shape.WIDTH,
    )  # fmt: skip
    events_from = _events_from(events_from, coded, columns)
    fields_from, fields_end = _placed(bits, count)
    unary_most = _placed(most, count)[1]
    ends = torch.stack([events_from[-1], fields_end[-1] >> 5, unary_most[-1] >> 5])
    ((events_all, fields_words, unary_words),) = yield Landing(ends)
    fields = torch.zeros(int(fields_words) + 1, dtype=torch.int32, device=device)
    events = torch.empty(int(events_all), dtype=torch.int64, device=device)
    streams.emit[(chunks_all,)](
        *chunk, counts, chunks_all, kinds, coded, events_from, fields_from, events, fields, CHUNK=_CHUNK,
        WIDTH=shape.WIDTH,
    )  # fmt: skip
    unary, unary_end = _unary(
        positions, events, kinds, coded, events_from, fields_from, fields, count, int(unary_words)
    )
    coded_changes = torch.diff(changes_from[::_CLASSES])
    landed = yield Landing(sums, choices, coded_changes, total, members, kinds, unary_end, unary, fields_end, fields)
    _collect(job, rows, landed)


def _events_from(positions_from: torch.Tensor, coded: torch.Tensor, columns: int) -> torch.Tensor:
    """Where the events of each subset begin: those of positions are apart from all others."""
    rest = coded.view(-1, columns).clone()
    rest[:, 0] = 0
    rest[:, columns // 2 + 1 :] = 0
    found = exclusive(rest, torch.int64)
    found[:-1].view(-1, columns)[:, 0] = positions_from[:-1]
    return found


def _placed(bits: torch.Tensor, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each column's bits begin when each segment's stream begins at a word, and where each stream ends.

    The last end is rounded up to words.
    """
    sums = exclusive(bits, torch.int64)
    whole = sums[:: len(bits) // segments]
    words = exclusive((torch.diff(whole) + 31) >> 5)
    begin = (words[:-1] << 5) - whole[:-1]
    places = (sums[:-1].view(segments, -1) + begin[:, None]).reshape(-1)
    return places, torch.cat([whole[1:] + begin, words[-1:] << 5])


def _unary(
    positions: torch.Tensor, events: torch.Tensor, kinds: torch.Tensor, coded: torch.Tensor, events_from: torch.Tensor,
    fields_from: torch.Tensor, fields: torch.Tensor, segments: int, most: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The unary streams, and where each ends; the low bits of gaps go to `fields`."""
    columns = len(kinds) // segments // _CLASSES
    lengths = torch.zeros_like(kinds)
    ends = []
    is_position = torch.arange(len(kinds), device=kinds.device) % columns == 0
    for part, mine in ((positions, is_position), (events, ~is_position)):
        sizes = torch.empty(len(part), dtype=torch.int32, device=part.device)
        if len(part):
            grid = (-(-len(part) // _CHUNK),)
            streams.gaps[grid](part, len(part), kinds, events_from, fields_from, sizes, fields, CHUNK=_CHUNK)
        ends.append(exclusive(sizes))
        begin = torch.where(mine & (coded > 0), events_from[:-1], 0)
        lengths += (ends[-1][begin + torch.where(mine, coded, 0)] - ends[-1][begin]) * mine
    unary_from, unary_end = _placed(lengths, segments)
    unary = torch.zeros(most + 1, dtype=torch.int32, device=kinds.device)
    for part, part_ends in zip((positions, events), ends, strict=True):
        if len(part):
            grid = (-(-len(part) // _CHUNK),)
            streams.ones[grid](part, len(part), events_from, unary_from, part_ends, unary, CHUNK=_CHUNK)
    return unary, unary_end


def _collect(job: _Job, rows: Rows, landed: list[Array]) -> None:
    """The bytes of a batch's segments."""
    sums, choices, changed, total, members, kinds, unary_end, unary, fields_end, fields = landed
    count = len(rows.spans)
    shaped = (count, _CLASSES, 2 * job.shape.WIDTH)
    table, sizes = tables.write(
        choices[:, 0],
        choices[:, 2],
        total.reshape(shaped),
        members.reshape(shaped),
        kinds.reshape(shaped),
        job.shape.WIDTH,
    )
    unary_bytes, fields_bytes = memoryview(unary.view(np.uint8)), memoryview(fields.view(np.uint8))
    unary_begin, fields_begin = _begins(unary_end), _begins(fields_end)
    for s, span in enumerate(rows.spans):
        if not changed[s]:
            job.add(span, [segment_head(SAME, 0)], sums[s], 0)
            continue
        stream = unary_bytes[unary_begin[s] : (int(unary_end[s]) + 7) // 8]
        field = fields_bytes[fields_begin[s] : (int(fields_end[s]) + 7) // 8]
        head = table[s, : sizes[s]].tobytes() + len(stream).to_bytes(4, "little")
        size = len(head) + len(stream) + len(field)
        if size < span.weights * job.layout.width // 8:
            pieces: list[Buffer] = [segment_head(CODED, size) + head, stream, field]
        else:
            pieces = _raw(job, span)
        job.add(span, pieces, sums[s], int(changed[s]))


def _begins(ends: Array) -> list[int]:
    """The first byte of each stream: the word after the last one of the stream before."""
    return [0, *(4 * ((int(end) + 31) >> 5) for end in ends[:-2])]


def _raw(job: _Job, span: Span) -> list[Buffer]:
    weights = job.words[span.tensor][1][span.start : span.start + span.weights]
    data = weights.cpu().view(torch.uint8).numpy().tobytes()
    return [segment_head(RAW, len(data)), data]
