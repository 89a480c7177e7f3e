"""Prompts that lie in a file. In memory are 40 bytes a prompt; a record is read and decoded when it is asked for.

So a million rows cost megabytes, not gigabytes, and a prompt is the same for as long as the run lives: the file is
held open (one put in its place changes nothing) and a record that was overwritten is noticed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import msgspec
from xxhash import xxh3_64_intdigest

from rillflow.dataflow.sources.plain import cannot_send, plain
from rillflow.dataflow.sources.rows import CACHED, refuse_duplicates
from rillflow.errors import DataError
from rillflow.storage import disk_errors
from rillflow.types import Prompt

Decode = Callable[[bytes, int], Prompt]
_WRITTEN_AT_ONCE = 1 << 20


class Stored:
    """Records of `file`, each decoded to the prompt of its number; `unit` is what a record is called (line, row)."""

    def __init__(self, name: str, unit: str, file: IO[bytes], decode: Decode) -> None:
        self._name, self._unit, self._decode = name, unit, decode
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._starts, self._lengths = array("q"), array("q")
        self._numbers, self._hashes, self._sums = array("q"), array("q"), array("Q")
        self._cached = lru_cache(CACHED)(self._read)

    def add(self, start: int, record: bytes, number: int, prompt: str) -> None:
        self._starts.append(start)
        self._lengths.append(len(record))
        self._sums.append(xxh3_64_intdigest(record))
        self._numbers.append(number)
        self._hashes.append(hash(prompt))

    def checked(self) -> Stored:
        """Itself, all records added; DataError when two have the same id."""
        refuse_duplicates(self._name, self, self._hashes)
        return self

    def where(self, index: int) -> str:
        return f"{self._unit} {self._numbers[index]}"

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._cached(index)

    def _read(self, index: int) -> Prompt:
        record = os.pread(self._descriptor, self._lengths[index], self._starts[index])
        if xxh3_64_intdigest(record) != self._sums[index]:
            raise DataError(
                f"{self._name}: {self.where(index)} was overwritten while the run used it",
                "restore the prompts that the run was started with, then `rillflow resume RUN`",
            )
        return self._decode(record, self._numbers[index])


def spooled(name: str, unit: str, rows: Iterable[tuple[str, dict[Any, Any]]]) -> Stored:
    """The rows (id and payload), checked and kept in an unnamed temporary file that goes when the process does.

    For what has no random access of its own. TMPDIR says where temporary files lie.
    """
    encoder = msgspec.msgpack.Encoder()
    with (
        disk_errors(Path(tempfile.gettempdir())),
        tempfile.TemporaryFile(buffering=_WRITTEN_AT_ONCE) as file,
    ):
        stored = Stored(name, unit, file, _decode)
        start = 0
        for number, (prompt, payload) in enumerate(rows, start=1):
            where = f"{name}: {unit} {number}"
            record = encode((prompt, plain(payload, where)), where, encoder)
            file.write(record)
            stored.add(start, record, number, prompt)
            start += len(record)
        file.flush()
        return stored.checked()


def encode(value: Any, where: str, encoder: msgspec.msgpack.Encoder) -> bytes:
    """Return the payload as it is sent; raises DataError if it cannot be."""
    try:
        return encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise cannot_send(where, str(error)) from error


_RECORD = msgspec.msgpack.Decoder(tuple[str, dict[str, Any]])


def _decode(record: bytes, number: int) -> Prompt:
    prompt, payload = _RECORD.decode(record)
    return Prompt(id=prompt, payload=payload)
