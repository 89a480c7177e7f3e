"""Storage units and the rows that they keep."""

from __future__ import annotations

from typing import Literal

from rillflow.types.base import Finite, Wire

# An acknowledged row survives the kill of any process, or also a power failure.
Durability = Literal["process", "machine"]


class Row(Wire, frozen=True):
    """The place of one row of columns in a storage unit."""

    unit: str
    segment: int
    offset: int
    length: int


class PutRows(Wire, frozen=True):
    rows: list[dict[str, bytes]]


class RowsPut(Wire, frozen=True):
    rows: list[Row]


class GetRows(Wire, frozen=True):
    rows: list[Row]
    columns: list[str]


class RowsGot(Wire, frozen=True):
    rows: list[dict[str, bytes]]


class UnitInfo(Wire, frozen=True):
    """A storage unit: `unit` is its permanent name, drawn once, `url` its present address.

    `path` is the folder of its segments, or empty. A process on the same host that can open it reads and writes there
    directly, with the unit's `durability`. `load` counts the bytes that wait or were written recently, `free` the bytes
    left. `ledger` is the number of the ledger whose rows it keeps.
    """

    unit: str
    path: str
    url: str = ""
    kind: str = "files"
    load: Finite = 0.0
    free: int = 0
    durability: Durability = "process"
    ledger: int = 0


class UnitBeat(Wire, frozen=True):
    """A unit's sign of life. `dropped` are segments that it has dropped as asked; `closed` are idle segments that will
    never be written again. `found`, sent occasionally, are all segments that are not being written: those that no task
    or stage has reported are reclaimed later."""

    info: UnitInfo
    dropped: list[int] = []
    closed: list[int] = []
    found: list[int] = []


class UnitBeatReply(Wire, frozen=True):
    """`drop` are segments that will never be read again; `idle` are those that could be dropped unless they are being
    written; `ended` says that the run has ended."""

    drop: list[int]
    idle: list[int] = []
    ended: bool = False


class Units(Wire, frozen=True):
    """The units of a run that reported recently, the least loaded first."""

    units: list[UnitInfo]


class LoseRows(Wire, frozen=True):
    """The report of rows that are damaged or missing: they are quarantined and their episodes played again."""

    rows: list[Row]
    reason: str
