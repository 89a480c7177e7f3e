"""verl: for each parameter the positions as int32 and the new weights, sent over NCCL as they are.

After verl-project/verl (volcengine/verl), verl/checkpoint_engine/delta_sync/encode.py, encoding `indices`, and
sparse_gather.py.
"""

from __future__ import annotations

import numpy as np

from bench.delta_formats import frame

Bits = dict[str, np.ndarray]


def encode(old: Bits, new: Bits) -> bytes:
    arrays = []
    for name, bits in new.items():
        at = np.flatnonzero(old[name] != bits)
        if len(at):
            arrays.append(({"name": name}, [at.astype(np.int32), bits.reshape(-1)[at]]))
    return frame.pack(arrays)


def apply(held: Bits, data: bytes) -> None:
    for told, (at, values) in frame.unpack(data):
        held[told["name"]].reshape(-1)[at] = values
