"""The frame of all formats: arrays of several tensors in one blob behind a JSON header, and zstd at level 1."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import zstandard

LEVEL = 1
_LENGTH = struct.Struct("<I")


def pack(arrays: Iterable[tuple[dict[str, Any], list[np.ndarray]]]) -> bytes:
    """For each tensor what the header says of it, and its arrays."""
    header, body = [], []
    for told, parts in arrays:
        header.append(told | {"parts": [[part.dtype.str, part.size] for part in parts]})
        body += [part.tobytes() for part in parts]
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *body])


def unpack(data: bytes) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    found = []
    for told in json.loads(data[_LENGTH.size : at]):
        parts = []
        for dtype, size in told["parts"]:
            parts.append(np.frombuffer(data, dtype, size, at))
            at += parts[-1].nbytes
        found.append((told, parts))
    return found


def squeeze(data: bytes | np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def spread(data: bytes | np.ndarray) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
