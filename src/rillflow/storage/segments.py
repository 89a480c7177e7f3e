"""Append-only segment files of checksummed records, each a small table of named columns.

A record that `append` has returned, after `sync`, survives kill -9 and power failure. A record that was torn by a
crash is never referred to: every writer starts a file of its own. A reader never returns bytes whose checksum does
not match: it raises CorruptData.

Record layout (little-endian, records start at multiples of 8):
    u32 magic | u32 crc32 of all that follows | u32 header length | u32 zero | u64 body length
    header: msgpack {column: [offset in body, length]}, padded to 8 | body: columns, each padded to 8
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path

import msgspec

from rillflow.errors import CorruptData, StorageError
from rillflow.storage.files import disk_errors, fsync_folder

MAGIC = 0x52494C4C  # "RILL"
_PREFIX = struct.Struct("<IIIIQ")
_CHECKED_FROM = 8
_MOST_MAPPED = 32
_Index = dict[str, tuple[int, int]]
_decode_index = msgspec.msgpack.Decoder(_Index).decode


def _padded(length: int) -> int:
    return (length + 7) & ~7


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def encode_record(columns: Mapping[str, bytes]) -> bytes:
    """One record, ready to be appended."""
    index: _Index = {}
    parts: list[bytes] = []
    at = 0
    for name, data in columns.items():
        index[name] = (at, len(data))
        parts.append(data + bytes(_padded(len(data)) - len(data)))
        at += _padded(len(data))
    header = msgspec.msgpack.encode(index)
    record = bytearray(_PREFIX.pack(MAGIC, 0, len(header), 0, at))
    record += header + bytes(_padded(len(header)) - len(header)) + b"".join(parts)
    struct.pack_into("<I", record, 4, zlib.crc32(memoryview(record)[_CHECKED_FROM:]))
    return bytes(record)


def decode_record(view: memoryview, columns: Sequence[str] | None = None) -> dict[str, memoryview]:
    """The asked-for columns as views; CorruptData when anything is not as it was written."""
    if len(view) < _PREFIX.size:
        raise CorruptData("record is cut off")
    magic, checksum, header_length, _, body_length = _PREFIX.unpack_from(view)
    start = _PREFIX.size + _padded(header_length)
    end = start + body_length
    if magic != MAGIC or end > len(view):
        raise CorruptData("record is cut off or not a record")
    if zlib.crc32(view[_CHECKED_FROM:end]) != checksum:
        raise CorruptData("record does not match its checksum")
    body = view[start:end]
    index = _decode_index(view[_PREFIX.size : _PREFIX.size + header_length])
    wanted = index if columns is None else [name for name in columns if name in index]
    return {name: body[index[name][0] : index[name][0] + index[name][1]] for name in wanted}


class SegmentWriter:
    """Appends records to numbered files in a folder, starting a new file after `limit` bytes."""

    def __init__(self, folder: Path, limit: int = 64 << 20) -> None:
        self._folder = folder
        self._limit = limit
        folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.stem) for path in folder.glob("*.seg"))
        # A new file for every writer: what an earlier one left, torn or damaged, is never touched again.
        self._number = numbers[-1] + 1 if numbers else 0
        self._at = 0
        self._file: BufferedWriter | None = self._open()

    def _open(self) -> BufferedWriter:
        """The next file that nobody has: a writer that lives on beside this one may have taken the number."""
        with disk_errors(self._folder):
            while segment_path(self._folder, self._number).exists():
                self._number += 1
            file = open(segment_path(self._folder, self._number), "xb")  # noqa: SIM115
            try:
                fsync_folder(self._folder)
            except OSError:
                file.close()
                raise
            return file

    def append(self, columns: Mapping[str, bytes]) -> tuple[int, int, int]:
        """Write a record; returns (segment, offset, length). Durable only after `sync`."""
        record = encode_record(columns)
        if self._at and self._at + len(record) > self._limit:
            self._roll()
        if self._file is None:
            self._file = self._open()
        try:
            with disk_errors(self._folder):
                self._file.write(record)
                self._file.flush()
        except StorageError:
            self._abandon(self._file)
            raise
        offset, self._at = self._at, self._at + len(record)
        return self._number, offset, len(record)

    def sync(self) -> None:
        if self._file is not None:
            with disk_errors(self._folder):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    # The next file is opened by the next append: a disk that refuses it now may take it then.

    def _abandon(self, file: BufferedWriter) -> None:
        """After a failed write the file may end in half a record: leave it behind, with all that was not synced."""
        # Closing the raw file drops what the buffer still holds; a plain close would try to write it again.
        file.raw.close()
        self._file, self._at = None, 0

    def _roll(self) -> None:
        self.sync()
        self.close()
        self._file, self._at = None, 0


class SegmentReader:
    """Maps segment files and hands out views into them; remaps when a file has grown.

    Only the files used last stay mapped: a run has more segments than a process may open files. A view keeps its own
    file mapped for as long as it is referred to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}

    def read(self, segment: int, offset: int, length: int, columns: Sequence[str]) -> dict[str, memoryview]:
        mapped = self._map(segment, offset + length)
        if offset + length > len(mapped):
            raise CorruptData(f"segment {segment} ends before offset {offset + length}", "the unit lost data")
        return decode_record(memoryview(mapped)[offset : offset + length], columns)

    def _map(self, segment: int, needed: int) -> mmap.mmap:
        mapped = self._maps.pop(segment, None)
        if mapped is None or len(mapped) < needed:
            try:
                with open(segment_path(self._folder, segment), "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError) as error:
                raise CorruptData(f"segment {segment} of {self._folder} is missing or empty") from error
        self._maps[segment] = mapped  # the last one: the first is the one that was used longest ago
        for oldest in list(self._maps)[:-_MOST_MAPPED]:
            self._maps.pop(oldest, None)
        return mapped
