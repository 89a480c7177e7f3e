"""Payloads as they can be sent: text, numbers, true, false, null, lists and objects, nothing else.

What has one obvious plain form is converted (numpy's numbers and arrays, dates and times as ISO text, tuples as
lists); for the rest the user has to choose one, and the error names the row and the key.
"""

from __future__ import annotations

from datetime import date, time
from typing import Any

import numpy as np

from rillflow.errors import DataError

Path = tuple[str | int, ...]
_AS_THEY_ARE = (str, float, bool, type(None))
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # integers that msgpack can carry
_NUMBERS_AND_TEXT = "biufU"  # numpy's kinds of dtype that have a Python type


class _NotPlain(Exception):
    def __init__(self, path: Path, what: str) -> None:
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


def _plain(value: Any, path: Path) -> Any:
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


def _key(key: Any, path: Path) -> str | int:
    if isinstance(key, str):
        return str(key)
    if type(key) is int:
        return key
    raise _NotPlain((*path, str(key)), f"a key of type {type(key).__name__}")


def _of_numpy(value: Any, path: Path) -> Any:
    if value.dtype.kind == "M":
        return np.datetime_as_string(value).tolist()
    if value.dtype.kind == "O" and value.ndim:
        return _plain(value.tolist(), path)
    if value.dtype.kind not in _NUMBERS_AND_TEXT or value.dtype.type is np.longdouble:
        raise _NotPlain(path, f"of numpy's type {value.dtype}")
    return value.tolist()


def _spelled(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
