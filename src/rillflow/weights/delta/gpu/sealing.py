"""Deltas that are finished where they landed: before the bytes of a tensor there is room for header and checksum.

A checksum is of the header and of what follows the checksum. So that one call computes it, the header lies right before
the segments first; when the checksum is known, both get their places.
"""

from __future__ import annotations

import numpy as np
import xxhash

from rillflow.weights.delta.gpu.batch import Array
from rillflow.weights.delta.gpu.heads import CHECKSUM, HEAD, SEALED
from rillflow.weights.delta.jit import compiled


def seal(data: Array, begin: Array, end: Array, heads: Array) -> None:
    """Write the headers, which are rows of `HEAD`, and the checksums of deltas from `begin` to `end`."""
    rows = heads.view(np.uint8).reshape(-1, HEAD.itemsize)
    _put(data, begin + CHECKSUM, rows[:, :SEALED])
    view, digest = data.data, xxhash.xxh3_64_intdigest
    heads["checksum"] = [
        digest(view[first:beyond])
        for first, beyond in zip((begin + CHECKSUM).tolist(), end.tolist(), strict=True)
    ]  # fmt: skip
    _put(data, begin, rows)


@compiled
def _put(data: Array, begin: Array, rows: Array) -> None:
    for row in range(len(begin)):
        for k in range(rows.shape[1]):
            data[begin[row] + k] = rows[row, k]
