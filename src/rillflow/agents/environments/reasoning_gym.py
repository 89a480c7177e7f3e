"""One question of a reasoning-gym dataset, one answer, scored by the dataset's own scorer.

A payload is the entry (`question`, `answer`, `metadata`) with its `source_dataset`, as `data.*.reasoning_gym` and
`prompts` make it. Entry i has the seed plus i; the seeds of the splits are far apart. Entries are made in a process
with a fixed hash seed, so the same seed gives the same question everywhere.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rillflow.agents.environments.bases import Turn, World, rows
from rillflow.agents.environments.splits import check_split
from rillflow.config import SourceConfig
from rillflow.dataflow.sources import open_source
from rillflow.errors import ConfigError
from rillflow.types import Observation

_FAR = 1 << 30  # between the seeds of the splits
_MOST = 1 << 20  # prompts of one seed
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class ReasoningGym(World):
    """An environment of one step. Without `partial` a score below 1 counts as 0.

    `dataset` and `arguments` make an entry if the payload has no question; that starts a process for each episode.
    """

    def __init__(self, *, dataset: str | None = None, arguments: dict[str, Any] | None = None, partial: bool = True):
        super().__init__(steps=1)
        self._partial = partial
        self._dataset = dataset
        self._arguments = arguments or {}
        self._entry: Mapping[str, Any] = {}
        _gym()

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        if "question" not in payload:
            payload = await asyncio.to_thread(self._drawn, int(payload.get("world", seed)))
        return await super().reset(payload, seed)

    def _drawn(self, seed: int) -> dict[str, Any]:
        if self._dataset is None:
            raise ConfigError("the payload has no question", "give data.prompts.reasoning_gym, or `dataset` here")
        return next(_entries(self._dataset, 1, seed, self._arguments))

    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        self._entry = payload
        return str(payload["question"])

    def act(self, action: str) -> Turn:
        said = _ANSWER.findall(action)
        score = score_entry(self._entry, said[-1].strip() if said else action)
        if not self._partial:
            score = float(score >= 1.0)
        return Turn("Right." if score >= 1.0 else "Wrong.", score, done=True)

    def actions(self) -> list[str] | None:
        return None

    async def plan(self) -> list[str]:
        return [] if self._state == "over" else [str(self._entry["answer"])]


def score_entry(entry: Mapping[str, Any], answer: str | None) -> float:
    """Return the score of the dataset's own scorer, from 0 to 1."""
    score = float(_scorer(entry["source_dataset"])(answer, dict(entry)))
    return min(max(score, 0.0), 1.0)


def prompts(
    split: str, count: int, seed: int, dataset: str = "leg_counting", arguments: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield entries of a dataset; `arguments` are those of `reasoning_gym.create_dataset` without `seed` and `size`."""
    check_split(split)
    first = seed * _MOST + (_FAR if split == "heldout" else 0)
    if not 0 <= seed < _FAR // _MOST or count > _MOST:
        raise ValueError(f"seed must be from 0 to {_FAR // _MOST - 1} and count at most {_MOST}")
    yield from rows(f"reasoning_gym-{dataset}", _entries(dataset, count, first, arguments or {}), split, count, seed)


def _entries(dataset: str, count: int, seed: int, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if given := {"seed", "size"} & set(arguments):
        raise ConfigError(f"the arguments have {', '.join(sorted(given))}", "leave them out: they are given")
    config = SourceConfig(reasoning_gym=dataset, arguments={**arguments, "seed": seed, "size": count})
    source = open_source(config, seed=0, shuffle=False)
    yield from (source.at(index).payload for index in range(source.length))


@cache
def _scorer(dataset: str) -> Any:
    return _gym().get_score_answer_fn(dataset)


def _gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError("reasoning-gym is not installed", "pip install rillflow[reasoning-gym]") from error
