"""Deltas that are finished where they landed: before the bytes of a tensor there is room for header and checksum.

A checksum is of the header and of what follows the checksum. So that one call computes it, the header lies right before
the segments first; when the checksum is known, both get their places.
"""

from __future__ import annotations

import numpy as np
import xxhash

from rillflow.weights.delta.gpu.batch import Array
from rillflow.weights.delta.gpu.heads import CHECKSUM, HEAD, SEALED
from rillflow.weights.delta.gpu.memory import digest_function, digest_of
from rillflow.weights.delta.gpu.threads import shared
from rillflow.weights.delta.jit import compiled


def seal(data: Array, begin: Array, end: Array, heads: Array) -> None:
    """Write the headers, which are rows of `HEAD`, and the checksums of deltas from `begin` to `end`."""
    rows = heads.view(np.uint8).reshape(-1, HEAD.itemsize)
    _put(data, begin + CHECKSUM, rows[:, :SEALED])
    heads["checksum"] = _checksums(data, begin + CHECKSUM, end)
    _put(data, begin, rows)


def _checksums(data: Array, begin: Array, end: Array) -> Array:
    found = np.zeros(len(begin), np.uint64)
    digest, address = digest_function(), data.ctypes.data

    def compute(first: int, beyond: int) -> None:
        if digest:
            _digests(digest, address, begin[first:beyond], end[first:beyond], found[first:beyond])
            return
        for number in range(first, beyond):
            found[number] = xxhash.xxh3_64_intdigest(data.data[begin[number] : end[number]])

    for share in shared(compute, np.append(0, np.cumsum(end - begin))):
        share.result()
    return found


@compiled
def _digests(digest: int, address: int, begin: Array, end: Array, found: Array) -> None:
    for number in range(len(begin)):
        found[number] = digest_of(digest, address + begin[number], end[number] - begin[number])


@compiled
def _put(data: Array, begin: Array, rows: Array) -> None:
    for row in range(len(begin)):
        for k in range(rows.shape[1]):
            data[begin[row] + k] = rows[row, k]
