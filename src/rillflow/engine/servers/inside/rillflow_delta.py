"""Deltas decoded and applied by torch on the device that holds the weights. Only the coded bytes are uploaded.

Rillflow's `kernels.delta.format` documents the bytes. A batch of segments is decoded in three steps:

1. The old weights of each segment are sorted by class (stable), so that the weight of a rank in a class is a look-up.
   This is the only step whose time depends on the number of weights; the others depend on the number of changes.
2. The class sizes are downloaded, and the host reads the tables (`rillflow_delta_streams`).
3. The streams of all segments are decoded at once, and the changes are added to the old weights. `decoded` leaves
   them there, so that a thread can decode while the weights are in use, and `make` changes them.

Invariants: whatever the bytes are, no index leaves its array, because an index error on a GPU ends the server. Bytes
that do not fit the weights raise DeltaError; the segments decoded before them have been applied, so the caller must
then load the whole version. A batch takes about 12 bytes of memory for each of its weights and 200 for each change.

End to end (`bench.weights_update`) decoding takes milliseconds on a GPU, and tenths of a second on a node's host.
Imports only the standard library, numpy and torch: it runs in the server's environment, not in Rillflow's.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

# Inside a server this folder is on the path; in Rillflow it is part of a package.
_streams = importlib.import_module(f"{__package__}.rillflow_delta_streams" if __package__ else "rillflow_delta_streams")
DeltaError, _check = _streams.DeltaError, _streams.check

_HEADER = struct.Struct("<4sBBQQQQ")  # magic, dtype, log2 of a segment's weights, weights, both fingerprints, checksum
_SEGMENT = struct.Struct("<BI")
_MAGIC = b"RFD2"
_SAME, _CODED, _RAW = range(3)
_LOG2 = range(12, 23)
_BATCH, _BATCH_BYTES = 1 << 25, 1 << 22  # weights and coded bytes (about one a change) that are decoded at once


class Layout(NamedTuple):
    """How a dtype uses its bits, its code in a header, and the integers of its size."""

    code: int
    width: int
    exponents: int
    mantissa: int
    integer: torch.dtype


LAYOUTS = {
    torch.bfloat16: Layout(1, 16, 1 << 8, 7, torch.int16),
    torch.float16: Layout(2, 16, 1 << 5, 10, torch.int16),
    torch.float32: Layout(3, 32, 1 << 8, 23, torch.int32),
}


class Piece(NamedTuple):
    """A delta and the flat, contiguous weights that it changes in place. `done` is called once they have changed."""

    weights_N: torch.Tensor
    data: memoryview
    done: Callable[[], None] = lambda: None


class _Segment(NamedTuple):
    """A run of weights, as integers, and what the delta says of it."""

    bits_N: torch.Tensor
    kind: int
    data: memoryview
    done: Callable[[], None] | None  # of the piece, where this is its last segment


class Change(NamedTuple):
    """New bits of some weights of a run, or of all of them. `done` is called once they are made."""

    bits_N: torch.Tensor
    place_K: torch.Tensor | None
    new_K: torch.Tensor
    done: Callable[[], None] | None


def apply_all(pieces: Iterable[Piece]) -> None:
    """Apply deltas of weights of one dtype, batch by batch."""
    for changes in decoded(pieces):
        make(changes)


def make(changes: Iterable[Change]) -> None:
    for change in changes:
        if change.place_K is None:
            change.bits_N.copy_(change.new_K)
        elif len(change.place_K):
            change.bits_N[change.place_K.long()] = change.new_K
        if change.done is not None:
            change.done()


def decoded(pieces: Iterable[Piece]) -> Iterator[list[Change]]:
    """Yield the changes of each batch of deltas of weights of one dtype; none is made."""
    some: list[_Segment] = []
    for piece in pieces:
        layout = LAYOUTS[piece.weights_N.dtype]
        for segment in _segments(piece, layout):
            some.append(segment)
            weights, size = sum(len(one.bits_N) for one in some), sum(len(one.data) for one in some)
            if weights >= _BATCH or size >= _BATCH_BYTES:
                yield _decoded(some, layout)
                some = []
    if some:
        yield _decoded(some, layout)


def _decoded(segments: Sequence[_Segment], layout: Layout) -> list[Change]:
    coded = [segment for segment in segments if segment.kind == _CODED]
    found = iter(_of_coded(coded, layout) if coded else [])
    changes = []
    for segment in segments:
        place_K, new_K = None, segment.bits_N
        if segment.kind == _RAW:
            new_K = torch.frombuffer(bytearray(segment.data), dtype=layout.integer)
        elif segment.kind == _CODED:
            place_K, new_K = next(found)
        if segment.kind != _SAME or segment.done is not None:
            changes.append(Change(segment.bits_N, place_K, new_K, segment.done))
    return changes


def _segments(piece: Piece, layout: Layout) -> Iterator[_Segment]:
    """Yield all segments of a delta, which must be all that it holds."""
    data, weights = piece.data, len(piece.weights_N)
    _check(len(data) >= _HEADER.size, "it ends too early")
    magic, code, log2, count, *_ = _HEADER.unpack_from(data)
    _check(magic == _MAGIC and log2 in _LOG2, "its header is damaged")
    _check((code, count) == (layout.code, weights), f"it is of {count} weights of dtype {code}, not of {weights}")
    bits_N, at = piece.weights_N.view(layout.integer), _HEADER.size
    for start in range(0, weights, 1 << log2):
        _check(at + _SEGMENT.size <= len(data), "it ends too early")
        kind, size = _SEGMENT.unpack_from(data, at)
        at += _SEGMENT.size
        part_N = bits_N[start : start + (1 << log2)]
        fits = {_SAME: size == 0, _CODED: size > 0, _RAW: size == part_N.nbytes}
        _check(fits.get(kind, False) and at + size <= len(data), f"a segment of kind {kind} has {size} bytes")
        last = start + (1 << log2) >= weights
        yield _Segment(part_N, kind, data[at : at + size], piece.done if last else None)
        at += size
    _check(at == len(data), f"{len(data) - at} bytes follow its last segment")


# ---------------------------------------------------------------- classes


class _Sorted(NamedTuple):
    """The old weights of a batch (`bits_B`), and where they are in the order of segments, classes and places. For each
    segment, how many weights each of its classes has."""

    bits_B: torch.Tensor
    place_B: torch.Tensor
    sizes: list[list[int]]


def _sorted_by_class(segments: Sequence[_Segment], layout: Layout) -> _Sorted:
    bits_B = torch.cat([segment.bits_N for segment in segments])
    starts = [_starts(segment.data, layout) for segment in segments]
    classes = [len(of_segment) for of_segment in starts]
    start_SC = torch.tensor(list(chain(*starts)), dtype=layout.integer).to(bits_B.device).split_with_sizes(classes)
    number_C = torch.arange(max(classes), dtype=torch.uint8, device=bits_B.device)
    places: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    at = 0
    for segment, start_C in zip(segments, start_SC, strict=True):
        old_N = bits_B[at : at + len(segment.bits_N)]
        exponent_N = (old_N >> layout.mantissa) & (layout.exponents - 1)
        class_N = (torch.bucketize(exponent_N, start_C, out_int32=True, right=True) - 1).to(torch.uint8)
        class_N, place_N = class_N.sort(stable=True)
        places.append((place_N + at).to(torch.int32))
        ends.append(torch.searchsorted(class_N, number_C[: len(start_C)], right=True))
        at += len(old_N)
    beyond = [end.tolist() for end in torch.cat(ends).cpu().split_with_sizes(classes)]
    sizes = [[end - begin for begin, end in pairwise([0, *of_segment])] for of_segment in beyond]
    return _Sorted(bits_B, torch.cat(places), sizes)


def _starts(data: memoryview, layout: Layout) -> list[int]:
    """Return the exponents that the classes of a coded segment begin at."""
    _check(len(data) > data[0], "a segment ends too early")
    starts = [0, *data[1 : data[0] + 1]]
    ascending = all(one < other for one, other in pairwise(starts))
    _check(ascending and starts[-1] < layout.exponents, "its classes are out of order")
    return starts


# ---------------------------------------------------------------- changes


def _of_coded(segments: Sequence[_Segment], layout: Layout) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the changes of each coded segment: the places there, and the new bits."""
    found = _sorted_by_class(segments, layout)
    device = found.bits_B.device
    streams = _streams.Streams([segment.data for segment in segments], found.sizes, layout.width, device)
    rows = streams.rows
    if not rows.rows:
        nothing = found.place_B[:0]
        yield from ((nothing, found.bits_B[:0]) for _ in segments)
        return
    changes = _streams.changes_of(streams)
    begin_G = torch.tensor(rows.begins, device=device)
    place_K = found.place_B[begin_G[changes.group_K] + changes.rank_K]
    new_K = _moved(found.bits_B[place_K.long()], changes.change_K, layout)
    counts = np.bincount(rows.segments, weights=rows.changes, minlength=len(segments)).astype(np.int64).tolist()
    first = at = 0
    for segment, count in zip(segments, counts, strict=True):
        yield place_K[at : at + count] - first, new_K[at : at + count]
        first, at = first + len(segment.bits_N), at + count


def _moved(old_K: torch.Tensor, change_K: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the bits of weights that many units in the last place further on."""
    sign = 1 << (layout.width - 1)
    full = 2 * sign - 1
    old_K = old_K.long() & full
    ordered_K = (torch.where((old_K & sign) != 0, full ^ old_K, old_K | sign) + change_K) & full
    new_K = torch.where((ordered_K & sign) != 0, ordered_K ^ sign, full ^ ordered_K)
    return torch.where(new_K >= sign, new_K - full - 1, new_K).to(layout.integer)
