"""Which version sampled each token that a run has trained on: from its ledger and its payloads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.dataflow.storage_unit import FileUnit
from rillflow.types import COLUMNS, Row

_TRAINED = """
    SELECT b.version AS trained_at, s.unit, s.segment, s.offset, s.length
    FROM steps t JOIN batches b ON b.id = t.batch JOIN members m ON m.batch = b.id
    JOIN samples s ON s.grp = m.grp AND s.policy = m.producer
    WHERE t.state = 'live' AND s.trained > 0 ORDER BY t.version, m.n, s.place, s.n
"""


@dataclass(frozen=True)
class TrainedSample:
    """`trained_at` is the version that the trainer had; `version_T` those that sampled the trained tokens."""

    trained_at: int
    version_T: npt.NDArray[Any]


def trained_samples(folder: Path) -> Iterator[TrainedSample]:
    """Return the trained tokens of a finished run whose one unit still has all rows."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        found = ledger.execute(_TRAINED).fetchall()
    unit = FileUnit(folder / "units" / "unit-0")
    try:
        rows = [
            Row(unit=name, segment=segment, offset=offset, length=length) for _, name, segment, offset, length in found
        ]
        for (trained_at, *_), columns in zip(found, unit.get(rows, ["versions", "mask"]), strict=True):
            version_N, mask_N = (np.frombuffer(columns[name], COLUMNS[name]) for name in ("versions", "mask"))
            yield TrainedSample(trained_at, version_N[mask_N != 0])
    finally:
        unit.close()
