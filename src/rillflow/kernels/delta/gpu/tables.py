"""The host's part of a delta: the tables of segments, and the header and checksum before the bytes of a tensor.

The tables of a batch are written in one call; `streams` says what the columns are. The device leaves room for tables
and headers, so that a delta is finished where it landed.
"""

from __future__ import annotations

import numpy as np
import xxhash

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.format import HEADER_SIZE
from rillflow.kernels.delta.gpu.batch import Array, Spans


def write(data: Array, some: Spans, totals: Array, choices: Array, table: Array, width: int) -> None:
    """The heads of a batch's segments and the tables of the coded ones, in the room that `places.pack` left them."""
    total, members, kinds = table.reshape(3, len(some), -1, 2 * width)
    begin = totals[:-1, 6] + np.where(some.start == 0, HEADER_SIZE, 0)
    if not _write(data, begin, totals, choices, some.weights * (width // 8), total, members, kinds, width):
        raise RuntimeError("a table has another size than the device computed")


@compiled
def _write(
    data: Array, begin: Array, totals: Array, choices: Array, raw: Array, total: Array, members: Array, kinds: Array,
    width: int,
) -> bool:  # fmt: skip
    for s in range(len(raw)):
        at = begin[s] + 5
        size = totals[s + 1, 6] - at
        kind = 0 if totals[s, 7] == 0 else (2 if size == raw[s] else 1)
        data[at - 5] = kind
        _put_32(data, at - 4, size)
        if kind != 1:
            continue
        end = _write_table(data, at, choices[s, 0], choices[s, 2], total[s], members[s], kinds[s], width)
        if end != at + totals[s, 5]:
            return False
        _put_32(data, end, (totals[s, 3] + 7) // 8)
    return True


@inlined
def _put_32(data: Array, at: int, number: int) -> None:
    for k in range(4):
        data[at + k] = number >> (8 * k) & 0xFF


@inlined
def _write_table(
    data: Array, at: int, limits: int, last: int, total: Array, members: Array, kinds: Array, width: int
) -> int:
    """Write a segment's table from `at` on; where it ends."""
    data[at] = last
    at += 1
    for c in range(1, last + 1):
        data[at] = 256 - (limits >> (8 * c) & 0xFF)
        at += 1
    for c in range(last + 1):
        for column in range(width + 1):
            left = members[c, column]
            some = 0 < left < total[c, column]
            while left > 0x7F:
                data[at] = left & 0x7F | 0x80
                left >>= 7
                at += 1
            data[at] = left
            at += 1
            if some:
                data[at] = kinds[c, column]
                at += 1
            if column != 1 and members[c, column] == 0:
                break
    return at


# ---------------------------------------------------------------- headers

# `format` says what they are.
HEAD = np.dtype(
    [
        ("magic", "S4"), ("dtype", "u1"), ("log2", "u1"), ("weights", "<u8"), ("base", "<u8"), ("result", "<u8"),
        ("checksum", "<u8"),
    ]
)  # fmt: skip
_SEALED = HEADER_SIZE - HEAD["checksum"].itemsize


def seal(data: Array, begin: Array, end: Array, heads: Array) -> None:
    """Write the headers, which are rows of `HEAD`, and the checksums of deltas from `begin` to `end`."""
    for number, (first, beyond) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        checksum = xxhash.xxh3_64(heads[number].tobytes()[:_SEALED])
        checksum.update(data.data[first + HEADER_SIZE : beyond])
        heads["checksum"][number] = checksum.intdigest()
        data[first : first + HEADER_SIZE] = np.frombuffer(heads[number].tobytes(), np.uint8)
