"""Storage units and the rows that they keep."""

from __future__ import annotations

from typing import Literal

from rillflow.types.base import Finite, Wire

# What a row survives once its put was acknowledged: the kill of any process, or a power failure too.
Durability = Literal["process", "machine"]


class Row(Wire, frozen=True):
    """Where a storage unit keeps one row of columns."""

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
    """A storage unit: `unit` was drawn once and is its name for good, `url` is where it listens now.

    `path` is the folder of segments: who can open it on the own host reads and writes there instead of asking; it
    is empty where a unit has none. `load` is the bytes that wait or were written lately, `free` the bytes left. All who
    write into the folder give their rows the unit's `durability`.
    """

    unit: str
    path: str
    url: str = ""
    kind: str = "files"
    load: Finite = 0.0
    free: int = 0
    durability: Durability = "process"


class UnitBeat(Wire, frozen=True):
    """A unit lives. `dropped` are the segments it was told to drop and has; `closed` those of the idle ones it was
    asked about that nobody will ever write into again; `found`, now and then, all that it has and nobody writes into:
    those that no task or stage has reported are reclaimed after a while."""

    info: UnitInfo
    dropped: list[int] = []
    closed: list[int] = []
    found: list[int] = []


class UnitBeatReply(Wire, frozen=True):
    """`drop`: segments that nobody will ever ask for again; `idle`: those that could go if nobody writes into them;
    `ended`: the run has ended."""

    drop: list[int]
    idle: list[int] = []
    ended: bool = False


class Units(Wire, frozen=True):
    """The units of a run that were heard of lately, the least loaded first."""

    units: list[UnitInfo]


class LoseRows(Wire, frozen=True):
    """Rows that could not be read as they were written: they are set aside and their episodes played again."""

    rows: list[Row]
    reason: str


class DropSegments(Wire, frozen=True):
    segments: list[int]
