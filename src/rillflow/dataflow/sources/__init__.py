"""Where prompts come from: the sources that a recipe names, and the endless sequences of their prompts.

Every row of a source is checked when the run starts, so a bad one ends no run midway. `at(index)` is pure: the same
index of the endless sequence of epochs gives the same prompt in every process, so a cursor is all that a resumed run
needs.

A mixture interleaves sources by weight: the k-th prompt (from 0) of a source of weight w stands at the time
(k + 1/2) / w; all prompts of all sources, in the order of their times, are the mixture (Webster's apportionment). So
the shares are the weights, exactly in the long run and within a few prompts after any number of them. Every source goes
through its own epochs.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rillflow.config import SourceConfig
from rillflow.contracts import PromptSource
from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.sources.benchmarks import open_benchmark
from rillflow.dataflow.sources.readers import (
    SUFFIXES,
    open_dataset,
    open_generator,
    open_jsonl,
    open_parquet,
    open_reasoning_gym,
)
from rillflow.dataflow.sources.rows import Rows
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt


def _open_file(config: SourceConfig) -> Rows:
    return open_parquet(config) if config.origin.endswith(SUFFIXES) else open_jsonl(config)


KINDS: dict[str, Callable[[SourceConfig], Rows]] = {
    "path": _open_file,
    "dataset": open_dataset,
    "reasoning_gym": open_reasoning_gym,
    "generator": open_generator,
    "benchmark": open_benchmark,
}


def open_sources(configs: Sequence[SourceConfig], *, seed: int, shuffle: bool) -> PromptSource:
    """One source as it is; several mixed by their weights, ids and prompts then naming the one they are of."""
    if len(configs) == 1:
        return open_source(configs[0], seed=seed, shuffle=shuffle)
    return Mixed(
        [
            Part(name, config.weight, open_source(config, seed=derive_seed(seed, "source", name), shuffle=shuffle))
            for name, config in zip(source_names(configs), configs, strict=True)
        ]
    )


def open_heldout(configs: Sequence[SourceConfig], *, seed: int) -> PromptSource | None:
    """Return the held-out source: one source as it is, or several one after the other, with their names in ids and
    prompts."""
    sources = [open_source(config, seed=seed, shuffle=False) for config in configs]
    if len(sources) < 2:
        return sources[0] if sources else None
    return Joined(list(zip(source_names(configs), sources, strict=True)))


def open_source(config: SourceConfig, *, seed: int, shuffle: bool) -> PromptSource:
    """The source that a recipe describes; DataError when it cannot be used."""
    kind = next(kind for kind in KINDS if getattr(config, kind) is not None)
    rows = KINDS[kind](config)
    if not len(rows):
        raise DataError(f"{config.origin} has no prompts", "give at least one")
    return Shuffled(rows, seed) if shuffle else InOrder(rows)


# ---------------------------------------------------------------- one source


class InOrder:
    """The prompts as they stand, epoch after epoch."""

    def __init__(self, prompts: Rows) -> None:
        self._prompts = prompts

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


class Shuffled:
    """A new order every epoch, fixed by the seed."""

    def __init__(self, prompts: Rows, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._permutation)

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        return self._prompts[int(self._order(epoch)[place])]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState's stream is frozen: another numpy gives the same order.
        generator = np.random.RandomState(derive_seed(self._seed, "order", epoch) & 0xFFFFFFFF)
        return generator.permutation(len(self._prompts)).astype(np.int64, copy=False)


# ---------------------------------------------------------------- several sources


class Joined:
    """`parts` are names, each once and without a slash, and sources. Ids and prompts name the source they are of."""

    def __init__(self, parts: Sequence[tuple[str, PromptSource]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(source.length for _, source in parts))

    @property
    def length(self) -> int:
        return self._ends[-1]

    def at(self, index: int) -> Prompt:
        index %= self.length
        which = bisect_right(self._ends, index)
        name, source = self._parts[which]
        prompt = source.at(index - (self._ends[which - 1] if which else 0))
        return Prompt(id=f"{name}/{prompt.id}", payload=prompt.payload, source=name)


# ---------------------------------------------------------------- a mixture


@dataclass(frozen=True)
class Part:
    """One source of a mixture; `name` is unique in it and has no slash."""

    name: str
    weight: float
    source: PromptSource


class Mixed:
    """`length`, one pass, is the fewest prompts after which every source was seen through at least once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._weights = _whole([part.weight for part in parts])
        self._total = sum(self._weights)
        common = math.lcm(*self._weights)
        self._steps = [common // weight for weight in self._weights]
        self.length = 1 + max(self._index(which, part.source.length - 1) for which, part in enumerate(parts))

    def at(self, index: int) -> Prompt:
        which, place = self._place(index)
        part = self._parts[which]
        prompt = part.source.at(place)
        return Prompt(id=f"{part.name}/{prompt.id}", payload=prompt.payload, source=part.name)

    def _place(self, index: int) -> tuple[int, int]:
        """Which source the prompt at `index` is of, and its position there.

        A source has floor(t * w + 1/2) prompts up to the time t, so all m have t * total, give or take m/2. Hence the
        time below has at most index - 1 prompts behind it and at least index - 1 - m: the few between are counted.
        """
        numerator, denominator = max(0, 2 * index - len(self._parts) - 2), 2 * self._total
        taken = [(2 * numerator * weight + denominator) // (2 * denominator) for weight in self._weights]
        for _ in range(index - sum(taken)):
            taken[self._next(taken)] += 1
        which = self._next(taken)
        return which, taken[which]

    def _next(self, taken: Sequence[int]) -> int:
        """The source whose next prompt has the earliest time; the first of equals."""
        return min(range(len(taken)), key=lambda which: (2 * taken[which] + 1) * self._steps[which])

    def _index(self, which: int, place: int) -> int:
        """Return the position in the mixture of the prompt at `place` of a source: the number of prompts with earlier
        times."""
        own, before = self._weights[which], 0
        for other, weight in enumerate(self._weights):
            # Odd numbers o with o / weight < (2 * place + 1) / own; or equal, for the sources that go first.
            most = ((2 * place + 1) * weight - (other >= which)) // own
            before += (most + 1) // 2
        return before


def _whole(weights: Sequence[float]) -> list[int]:
    """Integers in exactly the same proportions as the weights were written (0.1 is a tenth)."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


# ---------------------------------------------------------------- names of sources

_LONGEST = 80


def source_names(configs: Sequence[SourceConfig]) -> list[str]:
    taken: set[str] = set()
    for name in (config.name for config in configs if config.name):
        if name in taken:
            raise ConfigError(f"two sources of prompts are called {name!r}", "give each data.prompts its own name")
        taken.add(name)
    names = []
    for config in configs:
        name = config.name or _free(_default(config), taken)
        taken.add(name)
        names.append(name)
    return names


def _default(config: SourceConfig) -> str:
    if config.path:
        text = Path(config.path).stem
    elif config.generator:
        text = config.generator.rpartition(":")[2]
    else:
        text = Path(config.origin).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_LONGEST] or "source"


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free
