"""Small supervised recipes on the tiny policy, and their rows, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rillflow.config.supervised import FitRecipe
from rillflow.trainer.supervised.examples import Examples, read_examples
from rillflow.trainer.supervised.texts import Writer
from rillflow.types import Prompt

GENERATORS = {"sft": "demonstrations", "reward": "comparisons", "process_reward": "graded_steps"}


class Listed:
    """Rows of a list as a source."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    @property
    def length(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Prompt:
        return Prompt(id=str(index), payload=dict(self._rows[index]))


@cache
def writer() -> Writer:
    return Writer.load("tiny")


def fit_recipe(task: str, count: int = 12, **changes: Any) -> FitRecipe:
    def source(split: str) -> dict[str, Any]:
        place = f"rillflow.examples.stockroom:{GENERATORS[task]}"
        return {"generator": place, "arguments": {"split": split, "count": count, "seed": 1}}

    data = {"train": source("train"), "heldout": source("heldout"), **changes.pop("data", {})}
    steps = {} if "epochs" in data else {"steps": 4}
    trainer = {**steps, "batch_groups": 4, "lr": 1e-3, **changes.pop("trainer", {})}
    return FitRecipe.model_validate(
        {"name": "lesson", "task": task, "model": "tiny", "data": data, "trainer": trainer, **changes}
    )


def examples_of(rows: Sequence[Mapping[str, Any]], task: str, longest: int = 512, **changes: Any) -> Examples:
    return read_examples(Listed(rows), "rows.jsonl", fit_recipe(task, **changes), writer(), longest)
