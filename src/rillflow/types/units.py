"""Storage units, the rows that they keep, and the columns of a sample. Arrays travel as little-endian bytes, so a
reader can map them without a copy.
"""

from __future__ import annotations

import re
from typing import Literal

from rillflow.types.base import Finite, Wire

COLUMNS: dict[str, str] = {
    "tokens": "<i4",  # prompt, tool and sampled ids of one root-to-leaf path
    "mask": "|u1",  # 1 where the token was sampled and trains in this sample
    "logprobs": "<f4",  # of the distribution that was sampled from (temperature, top-p, top-k); 0 where mask is 0
    "raw_logprobs": "<f4",  # of the model's own distribution: untempered, uncut; 0 where mask is 0
    "temperatures": "<f4",  # that `logprobs` can be recomputed with; 0 where they cannot (greedy, top-p, top-k)
    "versions": "<i4",  # policy version that sampled the token; -1 where mask is 0
    "rewards": "<f4",  # given to the answer that ends with the token, NaN elsewhere; absent where no answer has its own
    "experts": "|u1",  # that a mixture chose for each token (`engine.experts`); absent where they are not recorded
    "transcript": "|u1",  # UTF-8 JSON of the episode's messages, on the first sample of a trajectory only
    "answer": "|u1",  # UTF-8 JSON of what the workflow returned, beside the transcript, for rewards of whole groups
}
_OWN_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}(_[NR])?\.(i4|i8|u1|f2|f4|f8)")


def column_dtype(name: str) -> str | None:
    """Return the dtype of a column: of `COLUMNS`, or a stage's own, whose name ends in it (`score_R.f4`); else None."""
    if name in COLUMNS:
        return COLUMNS[name]
    return f"<{name[-2:]}".replace("<u1", "|u1") if _OWN_COLUMN.fullmatch(name) else None


# ---------------------------------------------------------------- storage units


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
