"""Which columns a row may have. Checked wherever rows enter or are asked for, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.errors import BadRequest
from rillflow.storage.records import view_of
from rillflow.types import COLUMNS, column_dtype

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

# Packed choices of experts and texts have other lengths.
_PER_TOKEN = frozenset(name for name in COLUMNS if name not in ("experts", "transcript", "answer"))


@lru_cache(4096)
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a column; raises BadRequest for an unknown name."""
    known = column_dtype(name)
    if known is None:
        raise BadRequest(
            f"unknown columns {name!r:.80}",
            f"the columns are {', '.join(COLUMNS)}; one of your own ends in its dtype, such as `values.f4`",
        )
    return np.dtype(known)


def dtypes_of(names: Sequence[str]) -> dict[str, np.dtype[Any]]:
    return {name: dtype_of(name) for name in names}


def row_bytes(row: Mapping[str, Buffer]) -> int:
    return sum(view_of(data).nbytes for data in row.values())


def check_rows(rows: Sequence[Mapping[str, Buffer]]) -> int:
    """Return the bytes of all rows' columns; raises BadRequest for an invalid row: see `check_columns`."""
    return sum([check_columns(row) for row in rows])


def check_columns(row: Mapping[str, Buffer]) -> int:
    """Known names, whole elements, and the same number of tokens in every column that has one value a token.

    Returns the bytes of all columns.
    """
    tokens, size = -1, 0
    for name, data in row.items():
        dtype = dtype_of(name)
        count = _count(name, data, dtype)
        size += count * dtype.itemsize
        if name in _PER_TOKEN:
            if tokens not in (-1, count):
                raise BadRequest(f"columns of one row differ in length: {_lengths(row)}", "one value a token, in each")
            tokens = count
    return size


def _lengths(row: Mapping[str, Buffer]) -> dict[str, int]:
    return {name: _count(name, data, dtype_of(name)) for name, data in row.items() if name in _PER_TOKEN}


def _count(name: str, data: Buffer, dtype: np.dtype[Any]) -> int:
    """How many elements a column has."""
    if isinstance(data, np.ndarray):
        if data.dtype != dtype or not data.flags.c_contiguous:
            raise BadRequest(f"column {name} is no plain array of {dtype}", "np.ascontiguousarray(values, dtype)")
        return data.size
    view = view_of(data)
    if view.nbytes % dtype.itemsize or not view.c_contiguous:
        raise BadRequest(f"column {name} has {view.nbytes} bytes", f"its elements have {dtype.itemsize} bytes each")
    return view.nbytes // dtype.itemsize
