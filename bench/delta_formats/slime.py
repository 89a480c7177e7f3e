"""slime (THUDM/slime): three formats of its own, and one more; zstd at level 1 in all of them.

* xor: old xor new of a whole tensor, a byte stream of mostly zeros. `UpdateWeightFromDiskDelta._encode_delta` in
  slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py.
* overwrite: the positions of changed BYTES as u32 and the new bytes. `overwrite_encode` in slime/utils/disk_delta.py.
* gaps: the gaps between changed weights as u16 (u32 for a tensor with a larger one) and the new weights, one blob.
  `encode_deltas` in update_weight_from_distributed_delta.py, an earlier version, with `deltas_zstd`.
* positions + xor: the positions of changed weights as u32 and the xor of old and new. Not in the code; how the format
  is often described, and smaller than overwrite.
"""

from __future__ import annotations

import numpy as np

from bench.delta_formats import frame

Bits = dict[str, np.ndarray]


def encode_xor(old: Bits, new: Bits) -> bytes:
    arrays = []
    for name, bits in new.items():
        difference = old[name] ^ bits
        if difference.any():
            arrays.append(({"name": name}, [_squeezed(difference)]))
    return frame.pack(arrays)


def apply_xor(held: Bits, data: bytes) -> None:
    for told, (squeezed,) in frame.unpack(data):
        bits = held[told["name"]]
        bits ^= np.frombuffer(frame.spread(squeezed), bits.dtype).reshape(bits.shape)


def encode_overwrite(old: Bits, new: Bits) -> bytes:
    arrays = []
    for name, bits in new.items():
        octets = bits.reshape(-1).view(np.uint8)
        at = np.flatnonzero(octets != old[name].reshape(-1).view(np.uint8)).astype(np.uint32)
        if len(at):
            whole = np.concatenate([np.uint32([len(at)]).view(np.uint8), at.view(np.uint8), octets[at]])
            arrays.append(({"name": name}, [_squeezed(whole)]))
    return frame.pack(arrays)


def apply_overwrite(held: Bits, data: bytes) -> None:
    for told, (squeezed,) in frame.unpack(data):
        whole = frame.spread(squeezed)
        count = int.from_bytes(whole[:4], "little")
        octets = held[told["name"]].reshape(-1).view(np.uint8)
        octets[np.frombuffer(whole, np.uint32, count, 4)] = np.frombuffer(whole, np.uint8, count, 4 + 4 * count)


def encode_gaps(old: Bits, new: Bits) -> bytes:
    tensors, positions, values = [], [], []
    for name, bits in new.items():
        at = np.flatnonzero(old[name] != bits)
        if not len(at):
            continue
        gaps = np.diff(at, prepend=-1) - 1
        width = np.dtype(np.uint16 if gaps.max() <= 0xFFFF else np.uint32)
        tensors.append([name, width.str, len(at)])
        positions.append(gaps.astype(width).view(np.uint8))
        values.append(bits.reshape(-1)[at])
    return frame.squeeze(frame.pack([({"tensors": tensors}, [_joined(positions), _joined(values)])]))


def apply_gaps(held: Bits, data: bytes) -> None:
    ((told, (positions, values)),) = frame.unpack(frame.spread(data))
    first = byte = 0
    for name, width, count in told["tensors"]:
        gaps = np.frombuffer(positions, width, count, byte)
        held[name].reshape(-1)[np.cumsum(gaps.astype(np.int64) + 1) - 1] = values[first : first + count]
        first, byte = first + count, byte + gaps.nbytes


def encode_positions(old: Bits, new: Bits) -> bytes:
    arrays = []
    for name, bits in new.items():
        at = np.flatnonzero(old[name] != bits)
        if len(at):
            difference = old[name].reshape(-1)[at] ^ bits.reshape(-1)[at]
            arrays.append(({"name": name}, [_squeezed(at.astype(np.uint32)), _squeezed(difference)]))
    return frame.pack(arrays)


def apply_positions(held: Bits, data: bytes) -> None:
    for told, (positions, differences) in frame.unpack(data):
        bits = held[told["name"]].reshape(-1)
        bits[np.frombuffer(frame.spread(positions), np.uint32)] ^= np.frombuffer(frame.spread(differences), bits.dtype)


def _squeezed(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(frame.squeeze(np.ascontiguousarray(array)), np.uint8)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint8)
