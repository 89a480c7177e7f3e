"""A record: one small table of named columns, checksummed column by column and bound to its place.

Nothing is believed unless its checksum matches: the header's covers the record's own place (segment, offset), all
lengths and the checksums of the columns, so bytes that an earlier file left on the disk, a torn write or a record of
another place are never taken for this one. A read verifies the header and the columns it was asked for, no others.

Layout (little-endian; records and columns start at multiples of 8, so that arrays can be views):
    u64 xxh3 of all that follows up to the end of the header
    u32 magic | u32 header length | u64 body length | u64 segment | u64 offset
    header: msgpack {column: [length, xxh3]}, padded to 8 | body: columns in the header's order, each padded to 8
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from rillflow.errors import CorruptData

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

    Dtypes = Mapping[str, np.dtype[Any]]

Arrays = dict[str, npt.NDArray[Any]]
Index = dict[str, tuple[int, int]]
Wholes = dict[np.dtype[Any], npt.NDArray[Any]]  # arrays over all of one buffer, by dtype

MAGIC = 0x324C4952  # "RIL2"
_PREFIX = struct.Struct("<QIIQQQ")
_CHECKED = struct.Struct("<IIQQQ")  # the prefix without its checksum
_SUM = 8
_PADDING = tuple(bytes(-size & 7) for size in range(8))
_decode_index = msgspec.msgpack.Decoder(Index).decode


class Place(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int
    length: int


class Sealed(NamedTuple):
    """A record that only lacks its place: the header, and the columns' own buffers with their padding."""

    header: bytes
    buffers: list[memoryview | bytes]
    body: int

    @property
    def length(self) -> int:
        return _PREFIX.size + len(self.header) + (-len(self.header) & 7) + self.body

    def start(self, segment: int, offset: int) -> bytes:
        """What comes before the body when the record is written at this place."""
        checked = _CHECKED.pack(MAGIC, len(self.header), self.body, segment, offset) + self.header
        return xxh3_64_intdigest(checked).to_bytes(_SUM, "little") + checked + _PADDING[len(self.header) & 7]


def view_of(data: Buffer) -> memoryview:
    """The bytes of a column where they are."""
    return memoryview(data)  # type: ignore[arg-type]  # numpy tells of its buffers from Python 3.12 on


def index_of(columns: Mapping[str, memoryview]) -> Index:
    """Length in bytes and checksum of every column."""
    return {name: (view.nbytes, xxh3_64_intdigest(view)) for name, view in columns.items()}


def seal(columns: Mapping[str, Buffer]) -> Sealed:
    """The record of these columns; their buffers are referred to, never copied."""
    index: Index = {}
    buffers: list[memoryview | bytes] = []
    body = 0
    for name, data in columns.items():
        view = view_of(data)
        size = view.nbytes
        index[name] = (size, xxh3_64_intdigest(view))
        if size:
            buffers.append(view)
        if size & 7:
            buffers.append(_PADDING[size & 7])
        body += size + (-size & 7)
    return Sealed(msgspec.msgpack.encode(index), buffers, body)


def read_record(
    buffer: mmap.mmap | bytes, at: int, place: Place, columns: Dtypes, wholes: Wholes | None = None
) -> Arrays:
    """The asked-for columns of the record at `at`, as far as it has them, as views of `buffer`.

    `at + place.length` must not pass the end of the buffer. Reads of one buffer share `wholes`, in which they find or
    leave arrays over all of it. CorruptData when anything is not as it was written.
    """
    index = _read_header(buffer, at, place)
    wholes = {} if wholes is None else wholes
    found: Arrays = {}
    for name, dtype in columns.items():
        if name in index:
            start, size, checksum = index[name]
            if size % dtype.itemsize:
                raise CorruptData(f"column {name} of {place} has {size} bytes, not a whole number of elements")
            array = _array(buffer, start, size, dtype, wholes)
            if xxh3_64_intdigest(array) != checksum:  # type: ignore[arg-type]
                raise CorruptData(f"column {name} of {place} does not match its checksum", "the unit lost data")
            found[name] = array
    return found


def _array(buffer: mmap.mmap | bytes, start: int, size: int, dtype: np.dtype[Any], wholes: Wholes) -> npt.NDArray[Any]:
    """A slice of an array over the whole buffer takes a third of the time of an array of its own."""
    width = dtype.itemsize
    if start % width:  # only where somebody asked for a place that is none, and the buffer begins there
        return np.ndarray((size // width,), dtype, buffer, start)
    whole = wholes.get(dtype)
    if whole is None:
        whole = wholes[dtype] = np.ndarray((len(buffer) // width,), dtype, buffer)
    return whole[start // width : (start + size) // width]


def _read_header(buffer: mmap.mmap | bytes, at: int, place: Place) -> dict[str, tuple[int, int, int]]:
    """Where in the buffer each column begins, its length and its checksum."""
    if place.length < _PREFIX.size or place.offset & 7:
        raise CorruptData(f"{place} is no place of a record", "use a row that a put has returned")
    checksum, magic, size, body, segment, offset = _PREFIX.unpack_from(buffer, at)
    start = _PREFIX.size + size + (-size & 7)
    if magic != MAGIC or start + body != place.length or (segment, offset) != place[:2]:
        raise CorruptData(f"there is no whole record at {place}", "the unit lost data")
    checked = buffer[at + _SUM : at + _PREFIX.size + size]
    if xxh3_64_intdigest(checked) != checksum:
        raise CorruptData(f"the header of {place} does not match its checksum", "the unit lost data")
    try:
        index = _decode_index(checked[_CHECKED.size :])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the header of {place} cannot be read: {error}") from error
    found = {}
    begin = at + start
    for name, (length, digest) in index.items():
        found[name] = (begin, length, digest)
        begin += length + (-length & 7)
    if begin != at + place.length:
        raise CorruptData(f"the header of {place} contradicts itself")
    return found
