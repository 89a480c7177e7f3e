"""`rillflow leakage`, and the warning at the start of a run whose held-out prompts are among its training prompts."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rillflow.config import Recipe, SourceConfig
from rillflow.contracts import PromptSource
from rillflow.dataflow.sources import open_heldout, open_source, open_sources
from rillflow.dataflow.sources.benchmarks import benchmark
from rillflow.errors import ConfigError
from rillflow.evaluate.leakage import Leakage, look, same
from rillflow.runtime.folder import RunFolder

_SHOWN = 20
_LOOKED_AT = 20_000  # prompts of each side, at the start of a run
_FILES = (".jsonl", ".json", ".parquet")


def run_leakage(train: str, test: str | None, *, words: int, field: str | None, as_json: bool) -> int:
    """Print what was found; the exit code: 1 where there is anything."""
    found = look(*_sources(train, test), words=words, field=field)
    if as_json:
        print(json.dumps(found.plain(), indent=2, ensure_ascii=False))
    else:
        _show(found)
    return 1 if found.overlaps else 0


def _sources(train: str, test: str | None) -> tuple[PromptSource, PromptSource]:
    run = _run(train)
    if test is None and run is None:
        raise ConfigError("there is nothing to compare with", "give TRAIN and TEST, or a run that holds prompts out")
    left = _named(train) if run is None else open_sources(run.data.prompts, seed=run.seed, shuffle=False)
    if test is not None:
        return left, _named(test)
    heldout = None if run is None else open_heldout(run.data.heldout, seed=run.seed)
    if heldout is None:
        raise ConfigError(f"{train} holds no prompts out", "give TEST: a benchmark or a file")
    return left, heldout


def _run(text: str) -> Recipe | None:
    return RunFolder.open(text).recipe if (Path(text) / "recipe.yaml").is_file() else None


def _named(text: str) -> PromptSource:
    if text.endswith(_FILES):
        return open_source(SourceConfig(path=text), seed=0, shuffle=False)
    benchmark(text)
    return open_source(SourceConfig(benchmark=text), seed=0, shuffle=False)


def _show(found: Leakage) -> None:
    console, runs = Console(), len(found.overlaps) - found.exact
    console.print(
        f"{found.train} training prompts, {found.test} test questions: {found.exact} of these stand there word for "
        f"word, {runs} more share {found.words} words in a row",
        highlight=False,
        soft_wrap=True,
    )
    if not found.overlaps:
        return
    table = Table("test", "train", "how", "share of its runs")
    worst = sorted(found.overlaps, key=lambda one: (one.exact, one.share), reverse=True)
    for one in worst[:_SHOWN]:
        table.add_row(one.test, one.train, "word for word" if one.exact else "words in a row", f"{one.share:.0%}")
    console.print(table)
    if len(worst) > _SHOWN:
        console.print(f"… and {len(worst) - _SHOWN} more (--json has all)")


def warning_of(train: PromptSource, heldout: PromptSource | None) -> str | None:
    """Return a warning if held-out prompts are among the training prompts, else an empty text; a quick, exact check."""
    leaked = [] if heldout is None else same(train, heldout, most=_LOOKED_AT)
    if heldout is None or not leaked:
        return None
    return (
        f"{len(leaked)} of {heldout.length} held-out prompts are among those trained on, such as {leaked[0]!r}: "
        "held-out rewards will flatter the policy (`rillflow leakage RUN` looks closer)"
    )
