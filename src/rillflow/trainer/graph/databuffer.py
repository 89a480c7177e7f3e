"""What travels between the nodes of a step: the rows that this rank holds, and the columns that nodes have made.

A column's name says what it has one value of: `…_R` of each row, `…_N` of each token, rows end to end. Invariants:
every column has the length its name asks for; a databuffer is never changed, nodes make new ones; rows and all their
columns stay together however they are split, joined or sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.errors import GraphError
from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Ints

    Column = npt.NDArray[Any]

# What every source of rows gives. `start_R` follows from `length_R`.
FETCHED = tuple(column.name for column in fields(Rows) if column.name != "start_R")


@dataclass(frozen=True)
class Databuffer:
    """`made` are the columns that are not in `rows`; a column of `rows` that a node makes anew replaces it there."""

    rows: Rows
    made: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows.length_R)

    def __contains__(self, name: str) -> bool:
        return name in self.made or name in FETCHED

    def __getitem__(self, name: str) -> Column:
        if name in self.made:
            return self.made[name]
        if name not in FETCHED:
            raise GraphError(f"there is no column {name}", f"there are: {', '.join(self.names)}")
        column: Column = getattr(self.rows, name)
        return column

    @property
    def names(self) -> list[str]:
        return [*FETCHED, *self.made]

    @property
    def row_N(self) -> Ints:
        """Which row each token is of."""
        return np.repeat(np.arange(len(self)), self.rows.length_R)

    def adding(self, columns: Mapping[str, Column]) -> Databuffer:
        """With these columns, in place of those of the same name."""
        for name, column in columns.items():
            _check(name, column, self.rows)
        fetched = {name: column for name, column in columns.items() if name in FETCHED}
        made = {name: column for name, column in columns.items() if name not in FETCHED}
        return Databuffer(replace(self.rows, **fetched) if fetched else self.rows, {**self.made, **made})

    def taking(self, index_R: Ints) -> Databuffer:
        """These rows, in this order."""
        length_R = self.rows.length_R[index_R]
        within_N = np.arange(int(length_R.sum())) - np.repeat(np.cumsum(length_R) - length_R, length_R)
        index_N = np.repeat(self.rows.start_R[index_R], length_R) + within_N
        picked = {name: self[name][index_N if name.endswith("_N") else index_R] for name in self.names}
        return from_columns(picked)


Part = Rows | Databuffer  # of a batch, as the stream serves it: with columns of stages, or without


def from_columns(columns: Mapping[str, Column]) -> Databuffer:
    """`columns` must have all of FETCHED."""
    length_R = columns["length_R"]
    rows = Rows(start_R=np.cumsum(length_R) - length_R, **{name: columns[name] for name in FETCHED})
    return Databuffer(rows, {name: column for name, column in columns.items() if name not in FETCHED})


def joined(parts: Sequence[Databuffer]) -> Databuffer:
    """All rows, in the order of the parts, which must have the same columns."""
    if len(parts) == 1:
        return parts[0]
    return from_columns({name: np.concatenate([part[name] for part in parts]) for name in parts[0].names})


def _check(name: str, column: Column, rows: Rows) -> None:
    if not name.endswith(("_R", "_N")):
        raise GraphError(f"column {name} says not what it is of", "end its name in _R (rows) or _N (tokens)")
    size = len(rows.length_R) if name.endswith("_R") else len(rows.tokens_N)
    if np.shape(column) != (size,):
        what = "rows" if name.endswith("_R") else "tokens"
        raise GraphError(f"column {name} has shape {np.shape(column)}", f"there are {size} {what}: one value for each")
