"""AstraFlow: the flat index in the whole model as u32 (u64 from 2**32 weights on) and the new weight, no codec.

After `_compute_delta` in Infini-AI-Lab/astraflow, astraflow/weight_manager/transfer/sender_agent.py, and its twin in
transfer/tests/test_chunked_delta_equiv.py. A receiver that is not at exactly the previous version gets everything.
"""

from __future__ import annotations

import struct

import numpy as np

Bits = dict[str, np.ndarray]
HEADER = struct.Struct("<QHHi")  # changed weights, bytes of a weight, whether indices are u64, nothing


def encode(old: Bits, new: Bits) -> bytes:
    wide = sum(weight.size for weight in old.values()) > 0xFFFF_FFFF
    indices, values, start = [], [], 0
    for name, bits in new.items():
        at = np.flatnonzero(old[name] != bits)
        values.append(bits.reshape(-1)[at])
        indices.append((at + start).astype(np.uint64 if wide else np.uint32))
        start += bits.size
    index_K, value_K = np.concatenate(indices), np.concatenate(values)
    return b"".join([HEADER.pack(len(index_K), value_K.itemsize, wide, 0), index_K.tobytes(), value_K.tobytes()])


def apply(held: Bits, data: bytes) -> None:
    count, width, wide, _ = HEADER.unpack_from(data)
    index_K = np.frombuffer(data, np.uint64 if wide else np.uint32, count, HEADER.size)
    value_K = np.frombuffer(data, f"<u{width}", count, HEADER.size + index_K.nbytes)
    start = first = 0
    for bits in held.values():
        last = int(np.searchsorted(index_K, index_K.dtype.type(start + bits.size)))
        bits.reshape(-1)[index_K[first:last] - start] = value_K[first:last]
        start, first = start + bits.size, last
