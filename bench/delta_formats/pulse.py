"""PULSE, as grail sends it: sorted by row and column, the steps between rows, between columns, the new weights; zstd-1.

After `encode_sparse_delta_v3_1` in one-covenant/grail, grail/infrastructure/sparse_codec.py. Where the row goes on, the
column is a step from the one before; in a new row it is the column itself. Steps of rows are u8 and of columns u16, in
a tensor where one does not fit all of that kind are int32 (u16 for rows up to 65535). A vector has one column. One
frame of zstd holds all tensors.
"""

from __future__ import annotations

import numpy as np

from bench.delta_formats import frame

Bits = dict[str, np.ndarray]


def encode(old: Bits, new: Bits) -> bytes:
    arrays = []
    for name, bits in new.items():
        at = np.flatnonzero(old[name] != bits)
        if not len(at):
            continue
        rows, columns = np.divmod(at, bits.shape[1])
        down = np.diff(rows, prepend=0)
        same = down == 0
        same[0] = False
        along = np.where(same, np.diff(columns, prepend=0), columns)
        values = bits.reshape(-1)[at]
        arrays.append(({"name": name}, [_narrow(down, np.uint8, np.uint16), _narrow(along, np.uint16), values]))
    return frame.squeeze(frame.pack(arrays))


def _narrow(steps: np.ndarray, *widths: type[np.unsignedinteger]) -> np.ndarray:
    fits = [width for width in widths if steps.max() <= np.iinfo(width).max]
    return steps.astype(fits[0] if fits else np.int32)


def apply(held: Bits, data: bytes) -> None:
    for told, (down, along, values) in frame.unpack(frame.spread(data)):
        bits = held[told["name"]]
        rows = np.cumsum(down, dtype=np.int64)
        sums = np.cumsum(along, dtype=np.int64)
        begins = np.flatnonzero(down)
        if not len(begins) or begins[0]:
            begins = np.concatenate([[0], begins])
        before = np.repeat(sums[begins] - along[begins], np.diff(begins, append=len(along)))
        bits.reshape(-1)[rows * bits.shape[1] + sums - before] = values
