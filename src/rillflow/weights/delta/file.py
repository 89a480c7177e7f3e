"""A delta: what turns one tensor, its base, into another, bit for bit. bf16, fp16 and fp32.

The format. All numbers are little-endian; bit streams begin at the lowest bit of a byte; a varint has 7 bits a byte,
the lowest first. Weights are bits: NaN payloads, infinities, -0 and denormals are like all others.

    header    "RFD1", dtype u8 (1 bf16, 2 fp16, 3 fp32), log2 of the weights in a segment u8 (12 to 22), weights u64,
              hash of the base [16], hash of the result [16], checksum u64 of all other bytes of the delta
    segments  one after the other: kind u8, size u32, `size` bytes. Kind 0: nothing changed (no bytes); 1: coded;
              2: raw, the new weights. The last one may be of fewer weights.

    coded     table, unary size u32, unary stream, field stream
    table     classes - 1 u8, then for each class but the first the exponent u8 it begins at, ascending; then class by
              class: subset(changed), and where any did: subset(negative), subset(longer than 0), subset(longer than
              1), … to the first that is empty or to width - 2
    subset    members varint; if that is neither 0 nor all: kind u8 = Rice parameter | 0x80 if inverted

A class is made of the weights of a segment whose OLD value has an exponent in its range: base and table give its
size. `changed` is a subset of the ranks in the class, in the order of the positions. A change is the difference of
two weights as order-preserving integers (ULPs), modulo 2**width, taken as a signed number; `negative` is a subset of
the class's changes. The length of a change is floor(log2 |change|): `longer than l` is a subset of the changes
`longer than l - 1`.

A subset is coded by the gaps between its members, or if inverted its non-members: gap >> rice in unary (zeros, then a
one) in the unary stream, the low `rice` bits in the field stream. In the field stream follow, after the gaps of a
class, the low `length` bits of |change|, for length 1, 2, …, each in the order of positions. So the table gives the
first bit of every array in the field stream and the first one-bit of every array in the unary stream: nothing in
either must be read to find anything else. Both streams are padded with zeros to whole bytes.

Hashes are xxh3_128 (seed 0, canonical bytes) of the concatenated xxh3_128 of pieces of 64 KiB, the last one shorter:
pieces can be hashed at the same time. The checksum is xxh3_64.

Invariants: `apply` gives the bits that `encode` was given, or raises before anything is changed: CorruptData for a
damaged delta, WeightsError for another base. Whatever the bytes are, nothing outside of them is read, and no more
memory is used than a copy of the tensor and a bounded number of arrays of a segment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.delta import segment
from rillflow.weights.delta.bits import DAMAGED, Array
from rillflow.weights.delta.classes import Layout

_MAGIC = b"RFD1"
_HEADER = struct.Struct("<4sBBQ16s16s")
_CHECKSUM = struct.Struct("<Q")
_SEGMENT = struct.Struct("<BI")
_SAME, _CODED, _RAW = range(3)
_PIECE = 1 << 16
_LEAST, _MOST = 12, 22
_LAYOUTS = {
    torch.bfloat16: Layout(code=1, width=16, exponent=8, mantissa=7),
    torch.float16: Layout(code=2, width=16, exponent=5, mantissa=10),
    torch.float32: Layout(code=3, width=32, exponent=8, mantissa=23),
}
# Each changed weight takes some hundred bytes while its segment is coded; each segment has a table of its own.
_SPARSE_LOG2, _DENSE_LOG2 = 22, 20
_DENSE = 1 / 8


class _Header(NamedTuple):
    magic: bytes
    dtype: int
    segment_log2: int
    weights: int
    base: bytes
    result: bytes


def encode(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """The delta that makes `new` of `base`; both have the same dtype and shape."""
    layout, old_N, new_N = pair_of_bits(base, new)
    log2 = _segment_log2(old_N, new_N)
    header = _HEADER.pack(_MAGIC, layout.code, log2, len(old_N), fingerprint(old_N), fingerprint(new_N))
    body = [
        piece
        for start in range(0, len(old_N), 1 << log2)
        for piece in _segment(old_N[start : start + (1 << log2)], new_N[start : start + (1 << log2)], layout)
    ]
    checksum = xxhash.xxh3_64(header)
    for piece in body:
        checksum.update(piece)
    return b"".join([header, _CHECKSUM.pack(checksum.intdigest()), *body])


def _segment_log2(old_N: Array, new_N: Array) -> int:
    step = max(1, len(old_N) >> 16)
    sample = old_N[::step] != new_N[::step]
    return _DENSE_LOG2 if np.count_nonzero(sample) > _DENSE * len(sample) else _SPARSE_LOG2


def _segment(old_N: Array, new_N: Array, layout: Layout) -> tuple[bytes, bytes]:
    changed = np.flatnonzero(old_N != new_N)
    if not len(changed):
        return _SEGMENT.pack(_SAME, 0), b""
    coded = segment.encode(old_N, new_N, changed, layout)
    if len(coded) < new_N.nbytes:
        return _SEGMENT.pack(_CODED, len(coded)), coded
    return _SEGMENT.pack(_RAW, new_N.nbytes), new_N.tobytes()


def apply(base: torch.Tensor, delta: bytes) -> torch.Tensor:
    """A new tensor, of the shape and on the device of `base`. CorruptData or WeightsError if there is none."""
    layout, old_N = _bits(base)
    header, body = _opened(delta)
    _check_base(header, layout, old_N)
    new = torch.empty(base.shape, dtype=base.dtype)
    new_N = _bits(new)[1]  # the memory of `new`
    new_N[:] = old_N
    size = 1 << header.segment_log2
    for start, (kind, data) in zip(range(0, len(old_N), size), _segments(body, header), strict=True):
        _fill(old_N[start : start + size], kind, data, new_N[start : start + size], layout)
    if fingerprint(new_N) != header.result:
        raise CorruptData("a delta gives other weights than it says", DAMAGED)
    return new.to(base.device)


def apply_(base: torch.Tensor, delta: bytes) -> torch.Tensor:
    """The same in place: `base` is written only after everything has been verified."""
    with torch.no_grad():
        return base.copy_(apply(base, delta))


def pair_of_bits(base: torch.Tensor, new: torch.Tensor) -> tuple[Layout, Array, Array]:
    """The bits of both tensors, flat, and what they mean."""
    if base.dtype != new.dtype or base.shape != new.shape:
        raise WeightsError(
            f"a tensor was {base.dtype} {tuple(base.shape)} and is {new.dtype} {tuple(new.shape)}",
            "a delta needs the same dtype and shape: publish the whole version",
        )
    layout, old_N = _bits(base)
    return layout, old_N, _bits(new)[1]


def fingerprint(bits_N: Array) -> bytes:
    """The hash of weights."""
    data = bits_N.view(np.uint8).data
    whole = xxhash.xxh3_128()
    for start in range(0, len(data), _PIECE):
        whole.update(xxhash.xxh3_128_digest(data[start : start + _PIECE]))
    return whole.digest()


def _bits(tensor: torch.Tensor) -> tuple[Layout, Array]:
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        raise WeightsError(
            f"a tensor of {tensor.dtype} has no delta", "deltas are of bf16, fp16 and fp32: send it whole"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Array = flat.view(torch.int16 if layout.width == 16 else torch.int32).numpy()
    return layout, array.view(layout.unsigned)


def _opened(delta: bytes) -> tuple[_Header, memoryview]:
    """Header and segments of a delta that nobody changed."""
    start = _HEADER.size + _CHECKSUM.size
    if len(delta) < start or delta[: len(_MAGIC)] != _MAGIC:
        raise CorruptData("these bytes are no delta", DAMAGED)
    header, body = _Header(*_HEADER.unpack_from(delta)), memoryview(delta)[start:]
    checksum = xxhash.xxh3_64(memoryview(delta)[: _HEADER.size])
    checksum.update(body)
    if _CHECKSUM.unpack_from(delta, _HEADER.size) != (checksum.intdigest(),):
        raise CorruptData("a delta does not match its checksum", DAMAGED)
    if not _LEAST <= header.segment_log2 <= _MOST:
        raise CorruptData(f"a delta has segments of 2**{header.segment_log2} weights", DAMAGED)
    return header, body


def _check_base(header: _Header, layout: Layout, old_N: Array) -> None:
    if (header.dtype, header.weights, header.base) != (layout.code, len(old_N), fingerprint(old_N)):
        raise WeightsError(
            "a delta belongs to another base than these weights",
            "apply the deltas in order from the version these weights are of, or pull the whole version",
        )


def _segments(body: memoryview, header: _Header) -> Iterator[tuple[int, memoryview]]:
    """Kind and bytes of as many segments as the weights make, which must be all there is."""
    reader = segment.Reader(body)
    for _ in range(0, header.weights, 1 << header.segment_log2):
        kind, size = _SEGMENT.unpack(reader.take(_SEGMENT.size))
        yield kind, reader.take(size)
    if reader.at != len(body):
        raise CorruptData(f"a delta has {len(body) - reader.at} bytes too many", DAMAGED)


def _fill(old_N: Array, kind: int, data: memoryview, new_N: Array, layout: Layout) -> None:
    if kind == _CODED:
        segment.decode(old_N, data, new_N, layout)
    elif kind == _RAW and len(data) == new_N.nbytes:
        new_N[:] = np.frombuffer(data, layout.unsigned)
    elif kind != _SAME or len(data):
        raise CorruptData(f"a delta has a segment of kind {kind} and {len(data)} bytes", DAMAGED)
