"""Prompts by their place, for every kind of source; all are checked once, when the source is opened."""

from __future__ import annotations

import importlib
from array import array
from typing import Any, Protocol

import numpy as np

from rillflow.errors import ConfigError, DataError
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
