"""Columns that stages have added to samples before the trainer gets them.

A column has the name that the nodes of the step graph read it by: `…_N` holds a value for each token of the sample,
`…_R` one value. In a storage unit its name also ends in its dtype: `reference_N.f4`. Invariants: each column has one
stage; a column of another length, or with a value that is not finite, is damaged, and its stage makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rillflow.clients.payloads import DamagedRows
from rillflow.config import StageConfig, resolve_object
from rillflow.errors import ConfigError, CorruptData, did_you_mean
from rillflow.trainer.batches import Rows, no_rows
from rillflow.trainer.graph.databuffer import FETCHED, Databuffer
from rillflow.types import BatchSample

if TYPE_CHECKING:
    from rillflow.trainer.batches import Arrays
    from rillflow.trainer.graph.databuffer import Column

REFERENCE, SCORE = "reference_N", "score_R"
# The columns of the shipped kinds (`rillflow.stages`).
GIVES = {"reference": (REFERENCE,), "reward_model": (SCORE,)}
_DTYPE = "f4"


def columns_of_stage(name: str, config: StageConfig) -> tuple[str, ...]:
    """Return what a stage adds to a sample. A class of the user's declares it as `gives`."""
    if config.kind in GIVES:
        return GIVES[config.kind]
    if ":" not in config.kind:
        raise ConfigError(
            f"stage {name} has the unknown kind {config.kind!r}",
            f"{did_you_mean(config.kind, GIVES)}one of: {', '.join(GIVES)}; or module:Class, file.py:Class",
        )
    gives = getattr(resolve_object(config.kind), "gives", ())
    if not gives or isinstance(gives, str) or not all(column.endswith(("_R", "_N")) for column in gives):
        raise ConfigError(
            f"stage {name}: {config.kind} does not declare which columns it writes",
            'give the class `gives = ("novelty_R",)`: names that end in _R (one value a sample) or _N (one a token)',
        )
    return tuple(gives)


def staged_columns(stages: Mapping[str, StageConfig]) -> dict[str, str]:
    """Return the columns that the stages of a policy add, each with the name of its stage."""
    found: dict[str, str] = {}
    for name, config in stages.items():
        for column in columns_of_stage(name, config):
            if column in FETCHED:
                raise ConfigError(f"stage {name} writes {column}, which a sample has already", "give it another name")
            if column in found:
                raise ConfigError(f"stages {found[column]} and {name} both write {column}", "take one of them out")
            found[column] = name
    return found


def payload_name(column: str) -> str:
    """Return the name of a column in a storage unit."""
    return f"{column}.{_DTYPE}"


def with_staged(
    rows: Rows, samples: Sequence[BatchSample], payload: Sequence[Arrays], columns: Iterable[str]
) -> Databuffer:
    """Return the rows with what stages have added to them. DamagedRows names the rows of stages that do not fit."""
    return Databuffer(rows, {name: _column(name, rows, samples, payload) for name in columns})


def nothing_staged(columns: Iterable[str]) -> Databuffer:
    """Return the share of a rank that has no rows."""
    return Databuffer(no_rows(), {name: np.empty(0, np.float32) for name in columns})


def _column(name: str, rows: Rows, samples: Sequence[BatchSample], payload: Sequence[Arrays]) -> Column:
    missing = np.empty(0, np.float32)
    parts = [arrays.get(payload_name(name), missing) for arrays in payload]
    wanted_R = rows.length_R if name.endswith("_N") else np.ones_like(rows.length_R)
    bad = [
        sample
        for sample, part, wanted in zip(samples, parts, wanted_R.tolist(), strict=True)
        if len(part) != wanted or not np.isfinite(part).all()
    ]
    if bad:
        first = CorruptData(f"sample {bad[0].id}: column {name} of a stage is missing or damaged", "it is made again")
        raise DamagedRows([row for sample in bad for row in sample.extra or [sample.row]], first)
    return np.concatenate(parts)
