"""The one format of durable payload: records of named columns, checksummed and bound to their place.

Storage units and the gateway's session logs write it. A record is believed only where its checksums match. The prefix
names the record's own place (segment, offset), so bytes that an earlier file left on the disk, a torn write or a record
of another place are never taken for this one. A read verifies the prefix, the header and the columns that it was asked
for, no others. `read_record` reads a record whose place is known, `scan` all records of a file in order.

Layout (little-endian; records and columns start at multiples of 8, so that arrays can be views):
    prefix: u64 xxh3 of the rest of the prefix | u64 xxh3 of the header
            u32 magic | u32 header length | u64 body length | u64 segment | u64 offset
    header: msgpack {column: [length, xxh3]}, padded to 8 | body: columns in the header's order, each padded to 8
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
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
Index = dict[str, tuple[int, int]]  # length in bytes and checksum of each column
Columns = dict[str, tuple[int, int, int]]  # start in the buffer, length and checksum of each column

MAGIC = 0x334C4952  # "RIL3"
_PREFIX = struct.Struct("<QQIIQQQ")
_CHECKED = struct.Struct("<QIIQQQ")  # the prefix without its own checksum
_SUM = 8
_PADDING = tuple(bytes(-size & 7) for size in range(8))
_decode_index = msgspec.msgpack.Decoder(Index).decode


class Place(NamedTuple):
    """The place of a record."""

    segment: int
    offset: int
    length: int


class Sealed(NamedTuple):
    """A record that only lacks its place: the header, and the columns' own buffers with their padding."""

    header: bytes
    buffers: list[Buffer]
    body: int

    @property
    def length(self) -> int:
        return _PREFIX.size + len(self.header) + (-len(self.header) & 7) + self.body

    def start(self, segment: int, offset: int) -> bytes:
        """Return what comes before the body when the record is written at this place."""
        header = self.header
        checked = _CHECKED.pack(xxh3_64_intdigest(header), MAGIC, len(header), self.body, segment, offset)
        return xxh3_64_intdigest(checked).to_bytes(_SUM, "little") + checked + header + _PADDING[len(header) & 7]


def view_of(data: Buffer) -> memoryview:
    """Return the bytes of a column where they are."""
    return memoryview(data)  # type: ignore[arg-type]  # numpy tells of its buffers from Python 3.12 on


def index_of(columns: Mapping[str, memoryview]) -> Index:
    """Return the length in bytes and the checksum of every column."""
    return {name: (view.nbytes, xxh3_64_intdigest(view)) for name, view in columns.items()}


def seal(columns: Mapping[str, Buffer]) -> Sealed:
    """Return the record of these columns; their buffers are referred to, never copied."""
    index: Index = {}
    buffers: list[Buffer] = []
    body = 0
    for name, data in columns.items():
        # An array is used as it is: a view of it takes longer to make than the checksum of a short one.
        buffer = data if isinstance(data, np.ndarray) else memoryview(data)
        size = buffer.nbytes
        index[name] = (size, xxh3_64_intdigest(buffer))  # type: ignore[arg-type]
        if size:
            buffers.append(buffer)
        if size & 7:
            buffers.append(_PADDING[size & 7])
        body += size + (-size & 7)
    return Sealed(msgspec.msgpack.encode(index), buffers, body)


# ------------------------------------------------------------ a record at a known place


class Views:
    """A buffer of records with the columns that are asked for, each as an array over the whole buffer and the bytes of
    an element: a slice of that array takes a third of the time of a new one."""

    def __init__(self, buffer: mmap.mmap | bytes, columns: Dtypes) -> None:
        self.buffer = buffer
        self.columns: dict[str, tuple[npt.NDArray[Any], int]] = {
            name: (np.ndarray((len(buffer) // dtype.itemsize,), dtype, buffer), dtype.itemsize)
            for name, dtype in columns.items()
        }


def read_record(views: Views, at: int, place: Place) -> Arrays:
    """Return the asked-for columns of the record at `at`, as far as it has them, as views of the buffer.

    `at + place.length` must not pass the end of the buffer. CorruptData when anything is not as it was written.
    """
    index = _read_header(views.buffer, at, place)
    found: Arrays = {}
    for name, (whole, width) in views.columns.items():
        if name not in index:
            continue
        start, size, checksum = index[name]
        if size % width:
            raise CorruptData(f"column {name} of {place} has {size} bytes, not a whole number of elements")
        if start % width:  # only for an invalid place at which the buffer begins
            array = np.ndarray((size // width,), whole.dtype, views.buffer, start)
        else:
            array = whole[start // width : (start + size) // width]
        if xxh3_64_intdigest(array) != checksum:  # type: ignore[arg-type]
            raise CorruptData(f"column {name} of {place} does not match its checksum", "the unit lost data")
        found[name] = array
    return found


def _read_header(buffer: mmap.mmap | bytes, at: int, place: Place) -> Columns:
    """Return where in the buffer the columns of the record at `at` lie."""
    if place.length < _PREFIX.size or place.offset & 7:
        raise CorruptData(f"{place} is no place of a record", "use a row that a put has returned")
    checksum, header_sum, magic, size, body, segment, offset = _PREFIX.unpack_from(buffer, at)
    start = _PREFIX.size + size + (-size & 7)
    if magic != MAGIC or start + body != place.length or (segment, offset) != place[:2]:
        raise CorruptData(f"there is no whole record at {place}", "the unit lost data")
    if xxh3_64_intdigest(buffer[at + _SUM : at + _PREFIX.size]) != checksum:
        raise CorruptData(f"the prefix of {place} does not match its checksum", "the unit lost data")
    return _columns(buffer[at + _PREFIX.size : at + _PREFIX.size + size], header_sum, at + start, place)


def _columns(header: bytes, checksum: int, begin: int, place: Place) -> Columns:
    """Return the columns that a header names, the first of which begins at `begin`."""
    if xxh3_64_intdigest(header) != checksum:
        raise CorruptData(f"the header of {place} does not match its checksum", "the unit lost data")
    try:
        index = _decode_index(header)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the header of {place} cannot be read: {error}") from error
    found: Columns = {}
    at, end = begin, begin + place.length - _PREFIX.size - len(header) - (-len(header) & 7)
    for name, (length, digest) in index.items():
        found[name] = (at, length, digest)
        at += length + (-length & 7)
    if at != end:
        raise CorruptData(f"the header of {place} contradicts itself")
    return found


# ------------------------------------------------------------ all records of a file


class Unreadable(NamedTuple):
    """A damaged part of a file. `rest` says that everything behind it is lost too."""

    what: str
    rest: bool


def scan(data: bytes, segment: int) -> Iterator[Columns | Unreadable]:
    """Yield the columns of every record of a file, in order, as far as each was written to its end.

    Zeros at the end of the file were never written. The last record may be torn: then its last column reaches beyond
    what was written, and it is left out, because it was never acknowledged. This requires that every record ends in a
    byte other than zero, which the caller ensures. The columns' checksums are left to the caller.
    """
    at, end = 0, len(data.rstrip(b"\0"))
    while at + _PREFIX.size <= end:
        checksum, header_sum, _, size, body, *named = _PREFIX.unpack_from(data, at)
        if xxh3_64_intdigest(data[at + _SUM : at + _PREFIX.size]) != checksum or named != [segment, at]:
            yield Unreadable(f"segment {segment} cannot be read from byte {at} on", rest=True)
            return
        start = at + _PREFIX.size + size + (-size & 7)
        if start > end:
            return  # torn
        place = Place(segment, at, start + body - at)
        try:
            columns = _columns(data[at + _PREFIX.size : at + _PREFIX.size + size], header_sum, start, place)
        except CorruptData as error:
            yield Unreadable(error.message, rest=False)
        else:
            if any(begin + length > end for begin, length, _ in columns.values()):
                return  # torn
            yield columns
        at = start + body
