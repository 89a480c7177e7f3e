"""What reasoning-gym's own scorer says of an answer."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

_scorer: Any = cache(importlib.import_module("reasoning_gym").get_score_answer_fn)
_TUPLES = ("arc_agi", "rearc")  # their scorers compare tuples, which JSON has made lists of


def grade(entry: dict[str, Any], answer: str) -> float:
    """0.0 to 1.0."""
    source = entry["source_dataset"]
    if source in _TUPLES:
        grid = tuple(tuple(row) for row in entry["metadata"]["output"])
        entry = entry | {"metadata": entry["metadata"] | {"output": grid}}
    return float(_scorer(source)(answer, entry))
