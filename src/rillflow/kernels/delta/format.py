"""A delta: what turns one tensor, its base, into another, bit for bit. bf16, fp16 and fp32.

The format. All numbers are little-endian; bit streams begin at the lowest bit of a byte; a varint has 7 bits a byte,
the lowest first. Weights are bits: NaN payloads, infinities, -0 and denormals are like all others.

    header    "RFD2", dtype u8 (1 bf16, 2 fp16, 3 fp32), log2 of the weights in a segment u8 (12 to 22), weights u64,
              fingerprint of the base u64, fingerprint of the result u64, checksum u64 of all other bytes of the delta
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
one) in the unary stream, the low `rice` bits (at most 22) in the field stream. In the field stream follow, after the
gaps of a class, the low `length` bits of |change|, for length 1, 2, …, each in the order of positions. So the table
gives the first bit of every array in the field stream and the first one-bit of every array in the unary stream:
nothing in either must be read to find anything else. Both streams are padded with zeros to whole bytes.

Fingerprints are those of `weights.fingerprint`, of this tensor alone. The checksum is xxh3_64.

Invariants of all that read deltas: they give the bits that were encoded, or raise before anything is changed:
CorruptData for a damaged delta, WeightsError for another base. Whatever the bytes are, nothing outside of them is
read, and no more memory is used than a copy of the tensor and a bounded number of arrays of a segment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import xxhash

from rillflow.errors import CorruptData, WeightsError

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]

MAGIC = b"RFD2"
SAME, CODED, RAW = range(3)
LEAST_LOG2, MOST_LOG2 = 12, 22
MAX_RICE = 22
# Above this share of changed weights a decoded change is made of all weights.
DENSE = 1 / 8
DAMAGED = "the delta is damaged: fetch it again, or pull the whole version"

_HEADER = struct.Struct("<4sBBQQQ")
_CHECKSUM = struct.Struct("<Q")
_SEGMENT = struct.Struct("<BI")
# Bytes of the header and the checksum after it.
HEADER_SIZE = _HEADER.size + _CHECKSUM.size


class Layout(NamedTuple):
    """How a dtype uses its bits: sign, `exponent` bits, `mantissa` bits."""

    code: int
    width: int
    exponent: int
    mantissa: int

    @property
    def exponents(self) -> int:
        return 1 << self.exponent


LAYOUTS = {
    torch.bfloat16: Layout(code=1, width=16, exponent=8, mantissa=7),
    torch.float16: Layout(code=2, width=16, exponent=5, mantissa=10),
    torch.float32: Layout(code=3, width=32, exponent=8, mantissa=23),
}
DTYPES = frozenset(LAYOUTS)


class Encoded(NamedTuple):
    """A delta, the fingerprints of both tensors, and how many weights differ. The delta is read-only: it may share its
    memory with others, which lives as long as any of them."""

    data: bytes | memoryview
    base: int
    result: int
    changed: int = 0


class Coded(NamedTuple):
    """How many weights of a segment changed, what the fingerprint gains by it, and the bytes: none where nothing
    changed, and where they would be no fewer than those of the weights."""

    changed: int
    gained: int
    pieces: tuple[bytes, ...]


class Found(NamedTuple):
    """The changed weights of a segment: where, ascending, and their new bits; what the fingerprint gains."""

    index_K: Array
    value_K: Array
    gained: int


class Header(NamedTuple):
    dtype: int
    segment_log2: int
    weights: int
    base: int
    result: int

    def check_base(self, layout: Layout, weights: int, fingerprint: int) -> None:
        """WeightsError unless the delta is of weights like these."""
        if (self.dtype, self.weights, self.base) != (layout.code, weights, fingerprint):
            raise WeightsError(
                "a delta belongs to another base than these weights",
                "apply the deltas in order from the version these weights are of, or pull the whole version",
            )

    def check_result(self, fingerprint: int) -> None:
        if fingerprint != self.result:
            raise CorruptData("a delta gives other weights than it says", DAMAGED)


def layout_of(tensor: torch.Tensor) -> Layout:
    layout = LAYOUTS.get(tensor.dtype)
    if layout is None:
        raise WeightsError(
            f"a tensor of {tensor.dtype} has no delta", "deltas are of bf16, fp16 and fp32: send it whole"
        )
    return layout


def layout_of_pair(base: torch.Tensor, new: torch.Tensor) -> Layout:
    if base.dtype != new.dtype or base.shape != new.shape:
        raise WeightsError(
            f"a tensor was {base.dtype} {tuple(base.shape)} and is {new.dtype} {tuple(new.shape)}",
            "a delta needs the same dtype and shape: publish the whole version",
        )
    return layout_of(base)


def segment_head(kind: int, size: int) -> bytes:
    """Return the head of a segment."""
    return _SEGMENT.pack(kind, size)


def sealed(header: Header, body: Iterable[Buffer]) -> bytes:
    """A whole delta of the bytes of its segments, their heads included."""
    head = _HEADER.pack(MAGIC, *header)
    pieces = list(body)
    checksum = xxhash.xxh3_64(head)
    for piece in pieces:
        checksum.update(piece)
    return b"".join([head, _CHECKSUM.pack(checksum.intdigest()), *pieces])


def opened(data: Buffer) -> tuple[Header, memoryview]:
    """Return the header and the segments of a delta, after its checksum was verified."""
    view = memoryview(data).cast("B")
    if len(view) < HEADER_SIZE or view[: len(MAGIC)] != MAGIC:
        raise CorruptData("these bytes are no delta", DAMAGED)
    header, body = Header(*_HEADER.unpack_from(view)[1:]), view[HEADER_SIZE:]
    checksum = xxhash.xxh3_64(view[: _HEADER.size])
    checksum.update(body)
    if _CHECKSUM.unpack_from(view, _HEADER.size) != (checksum.intdigest(),):
        raise CorruptData("a delta does not match its checksum", DAMAGED)
    if not LEAST_LOG2 <= header.segment_log2 <= MOST_LOG2:
        raise CorruptData(f"a delta has segments of 2**{header.segment_log2} weights", DAMAGED)
    return header, body


def segments(header: Header, body: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Kind and bytes of as many segments as the weights make, which must be all there is."""
    at = 0
    for _ in range(0, header.weights, 1 << header.segment_log2):
        if at + _SEGMENT.size > len(body):
            raise CorruptData("a delta ends too early", DAMAGED)
        kind, size = _SEGMENT.unpack_from(body, at)
        at += _SEGMENT.size + size
        if at > len(body):
            raise CorruptData("a delta ends too early", DAMAGED)
        if kind > RAW or (kind == SAME and size):
            raise CorruptData(f"a delta has a segment of kind {kind} and {size} bytes", DAMAGED)
        yield kind, body[at - size : at]
    if at != len(body):
        raise CorruptData(f"a delta has {len(body) - at} bytes too many", DAMAGED)
