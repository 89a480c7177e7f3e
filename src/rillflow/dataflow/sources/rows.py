"""Prompts by their place, all of them checked once, when the source is opened.

Payloads are what can be sent: text, numbers, true, false, null, lists and objects. Values with one obvious plain form
are converted (numpy's numbers and arrays, dates and times as ISO text, tuples as lists). Any other value is an error
that names the row and the key.

Prompts that lie in a file take 40 bytes of memory each; a record is read and decoded when it is asked for. A prompt is
the same for as long as the run lives: the file is held open, and a record that was overwritten is noticed.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from rillflow.errors import ConfigError, DataError
from rillflow.storage import disk_errors
from rillflow.types import Prompt

CACHED = 256  # prompts kept decoded: those of the groups being played are asked for again and again


class Rows(Protocol):
    """Prompts by their place, pure: the same place gives the same prompt for as long as the run lives."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


class Located(Rows, Protocol):
    """Rows that know where a prompt stands, in the words of who has to mend it there (`line 3`)."""

    def where(self, index: int) -> str: ...


def prompt_id(row: dict[str, Any], key: str, number: int) -> str:
    """The row's own id, or its number where it has none."""
    own = row.get(key)
    return str(number if own is None else own)


def refuse_duplicates(name: str, rows: Located, hashes: array[int]) -> None:
    """DataError when two prompts have the same id.

    `hashes` are those of the ids, in order: eight bytes a prompt instead of a set of all texts. Only where two are
    equal are the ids themselves compared, so no chance collision is ever taken for a duplicate.
    """
    keys = np.array(hashes, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    pairs = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    seen: dict[str, int] = {}
    for index in np.unique(order[np.concatenate([pairs, pairs + 1])]).tolist():
        found = rows[index].id
        if found in seen:
            raise DataError(
                f"{name}: {rows.where(index)} has the id {found!r} of {rows.where(seen[found])}",
                "give every prompt its own id",
            )
        seen[found] = index


def optional_package(module: str, extra: str) -> Any:
    """A package that only this kind of source needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(module, extra) from error


def missing_package(module: str, extra: str) -> ConfigError:
    return ConfigError(f"this source of prompts needs the package {module}", f"pip install rillflow[{extra}]")


# ---------------------------------------------------------------- plain payloads

Keys = tuple[str | int, ...]
_AS_THEY_ARE = (str, float, bool, type(None))
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # integers that msgpack can carry
_NUMBERS_AND_TEXT = "biufU"  # numpy's kinds of dtype that have a Python type


class _NotPlain(Exception):
    def __init__(self, path: Keys, what: str) -> None:
        super().__init__(f"{_spelled(path)} is {what}")


def plain(payload: dict[Any, Any], where: str) -> dict[str, Any]:
    """Return the payload in plain values; raises DataError if a value has no obvious plain form."""
    try:
        for key in payload:
            if not isinstance(key, str):
                raise _NotPlain((str(key),), f"a key of type {type(key).__name__}")
        return {str(key): _plain(value, (str(key),)) for key, value in payload.items()}
    except _NotPlain as error:
        raise cannot_send(where, str(error)) from None
    except RecursionError:
        raise cannot_send(where, "it is nested too deeply") from None


def cannot_send(where: str, why: str) -> DataError:
    return DataError(
        f"{where} cannot be sent to a node: {why}",
        "keep payloads to what JSON can say: text, numbers, lists and objects (bytes as base64 text, a Decimal as "
        "text or float)",
    )


def _plain(value: Any, path: Keys) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        if not _SMALLEST <= value <= _LARGEST:
            raise _NotPlain(path, "an integer of more than 64 bits")
        return value
    if isinstance(value, dict):
        return {_key(key, path): _plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, place)) for place, item in enumerate(value)]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, np.generic | np.ndarray):
        return _of_numpy(value, path)
    raise _NotPlain(path, f"of type {kind.__name__}")


def _key(key: Any, path: Keys) -> str | int:
    if isinstance(key, str):
        return str(key)
    if type(key) is int:
        return key
    raise _NotPlain((*path, str(key)), f"a key of type {type(key).__name__}")


def _of_numpy(value: Any, path: Keys) -> Any:
    if value.dtype.kind == "M":
        return np.datetime_as_string(value).tolist()
    if value.dtype.kind == "O" and value.ndim:
        return _plain(value.tolist(), path)
    if value.dtype.kind not in _NUMBERS_AND_TEXT or value.dtype.type is np.longdouble:
        raise _NotPlain(path, f"of numpy's type {value.dtype}")
    return value.tolist()


def _spelled(path: Keys) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


# ---------------------------------------------------------------- prompts that lie in a file

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
