"""The file of a version's delta: pieces, each of which changes a run of tensors or of parts of them.

    header    "RFC1", size of the list u32, the list: msgpack, deflated (zlib); for each piece its parts, its kind and
              its size, for each part the tensor's name, its first weight and its number of weights
    pieces    one after the other, in the order of the list, to the end of the file

A part holds consecutive weights of the flat tensor and begins at a multiple of 8 bytes, so its contribution to the
tensor's fingerprint is a separate sum. A piece holds the weights of all its parts, which have one dtype, one after the
other: many small tensors share the tables of one delta. Kind "delta" is a delta of these weights as one tensor
(`format`); "raw" is their new content.

Invariants: weights without a piece do not change; no part is empty, no two parts of a delta overlap, and no two parts
of one piece belong to the same tensor. A reader gets pieces within the file; their decoder verifies their content, and
the manifest has the hash of the whole file.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rillflow.errors import CorruptData
from rillflow.types.decoding import msgpack_decoder

_START = struct.Struct("<4sI")
_MAGIC = b"RFC1"
_LONGEST_LIST = 64 << 20
_DAMAGED = "it is damaged: pull it again, or a whole version"

Kind = Literal["delta", "raw"]


class Part(NamedTuple):
    tensor: str
    first: int
    weights: int


class Piece(NamedTuple):
    parts: tuple[Part, ...]
    kind: Kind
    data: bytes | memoryview

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts)


class Located(NamedTuple):
    """The place of a piece in a file."""

    parts: tuple[Part, ...]
    kind: Kind
    path: Path
    begin: int
    size: int


class _Listed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    parts: tuple[Part, ...]
    kind: Kind
    size: int


def write(pieces: Sequence[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file."""
    listed = zlib.compress(
        msgspec.msgpack.encode([_Listed(piece.parts, piece.kind, len(piece.data)) for piece in pieces]), 9
    )
    yield _START.pack(_MAGIC, len(listed)) + listed
    for piece in pieces:
        yield piece.data


def read(paths: Iterable[Path]) -> list[Piece]:
    """Return the pieces of all files of a delta. Their data are views, which stay valid if the files are removed."""
    pieces = [
        Piece(one.parts, one.kind, content[one.begin : one.begin + one.size])
        for content, found in map(_opened, paths)
        for one in found
    ]
    _check_parts(pieces)
    return pieces


def locate(paths: Iterable[Path]) -> list[Located]:
    """Return the places of the pieces in all files of a delta, without their data."""
    found = [one for path in paths for one in _opened(path)[1]]
    _check_parts(found)
    return found


def _check_parts(pieces: Sequence[Piece | Located]) -> None:
    ends: dict[str, int] = {}
    for part in sorted(part for piece in pieces for part in piece.parts):
        if part.first < ends.get(part.tensor, 0):
            raise CorruptData(f"a delta changes weights of {part.tensor} twice", _DAMAGED)
        ends[part.tensor] = part.first + part.weights


def _opened(path: Path) -> tuple[memoryview, list[Located]]:
    """Return a file's content, mapped, and its pieces."""
    try:
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CorruptData(f"{path} cannot be read: {error}", _DAMAGED) from error
    listed, at = _list(content, path)
    begins = accumulate((one.size for one in listed), initial=at)
    found = [Located(one.parts, one.kind, path, begin, one.size) for one, begin in zip(listed, begins, strict=False)]
    return content, found


def _list(content: memoryview, path: Path) -> tuple[list[_Listed], int]:
    """Return the file's list of pieces, which must cover the file, and the place of the first piece."""
    if len(content) < _START.size or content[: len(_MAGIC)] != _MAGIC:
        raise CorruptData(f"{path} is not a file of deltas", _DAMAGED)
    start = _START.size + _START.unpack_from(content)[1]
    if start > len(content):
        raise CorruptData(f"{path} is cut", _DAMAGED)
    try:
        deflated = zlib.decompressobj()
        text = deflated.decompress(content[_START.size : start], _LONGEST_LIST)
        listed = msgpack_decoder(list[_Listed]).decode(text)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} has no valid list of pieces: {error}", _DAMAGED) from error
    if not deflated.eof or deflated.unused_data:
        raise CorruptData(f"{path} has a list of pieces that does not end where it should", _DAMAGED)
    if any(one.size < 0 for one in listed) or any(p.first < 0 or p.weights < 1 for one in listed for p in one.parts):
        raise CorruptData(f"{path} has pieces or parts of an impossible size", _DAMAGED)
    if any(len({part.tensor for part in one.parts}) < len(one.parts) for one in listed):
        raise CorruptData(f"{path} has several parts of a tensor in one piece", _DAMAGED)
    if not all(one.parts for one in listed) or start + sum(one.size for one in listed) != len(content):
        raise CorruptData(f"{path} has {len(content) - start} bytes of pieces, other than its list says", _DAMAGED)
    return listed, start
