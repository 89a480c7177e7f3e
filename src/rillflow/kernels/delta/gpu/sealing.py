"""Deltas that are finished where they landed: before the bytes of a tensor there is room for header and checksum."""

from __future__ import annotations

import numpy as np
import xxhash

from rillflow.kernels.delta.format import HEADER_SIZE
from rillflow.kernels.delta.gpu.batch import Array

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
