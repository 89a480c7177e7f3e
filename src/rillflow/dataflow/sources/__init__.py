"""Where prompts come from. Every row of a source is checked when the run starts, so a bad one ends no run midway.

`at(index)` is pure: the same index of the endless sequence of epochs gives the same prompt in every process, so a
cursor is all that a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from rillflow.dataflow.sources.sequences import InOrder, Joined, Mixed, Part, Shuffled, source_names
from rillflow.errors import DataError

__all__ = ["InOrder", "Joined", "Mixed", "Shuffled", "open_heldout", "open_source", "open_sources"]


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
