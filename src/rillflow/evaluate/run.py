"""An evaluation from the engines' start to the report: one benchmark after the other, by the same engines.

Its folder: recipe.yaml (what played), settings.json (what must be the same for records to be added to), one file of
records for each benchmark, report.json, logs/ of servers, trajectories.sqlite (what was said).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rillflow.agents.rewards.registry import load_group_reward
from rillflow.config import Recipe
from rillflow.errors import ConfigError
from rillflow.evaluate.playing import Tally, play_suite
from rillflow.evaluate.records import KeptEpisodes, Record, RecordFile, fingerprint
from rillflow.evaluate.scores import Scores, score
from rillflow.evaluate.stage import open_engines, open_stage
from rillflow.evaluate.suites import Suite
from rillflow.storage import disk_errors, read_json, write_json

SETTINGS, REPORT = "settings.json", "report.json"


@dataclass(frozen=True)
class Evaluation:
    """What to play. `settings` are whatever the answers depend on; `recipe` is that of the engines."""

    recipe: Recipe
    suites: Sequence[Suite]
    settings: Mapping[str, Any]
    folder: Path
    samples: int
    seed: int

    def records(self, suite: Suite) -> Path:
        return self.folder / "records" / f"{suite.name.replace(':', '-')}.jsonl"

    def claim(self) -> None:
        """Take the folder, before anything is played: records of other settings are never mixed with these."""
        with disk_errors(self.folder):
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        path, settings = self.folder / SETTINGS, dict(self.settings)
        if path.is_file():
            before = read_json(path)
            other = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
            if other:
                raise ConfigError(
                    f"{self.folder} has records of another evaluation: {', '.join(other)} differ",
                    "give another folder as --out",
                )
        write_json(path, settings, private=True)


@dataclass(frozen=True)
class Result:
    """The result of one benchmark. `tokens` and `seconds` count only the samples that this run has played."""

    scores: Scores
    fingerprint: str
    tokens: int
    seconds: float


async def evaluate(evaluation: Evaluation, show: Callable[[Tally], None]) -> dict[str, Result]:
    """Play what is missing and write the report, in a folder that was claimed."""
    if any(load_group_reward(suite.recipe.reward) is not None for suite in evaluation.suites):
        raise ConfigError(
            "the recipe's `reward` names `group`, and an evaluation plays and rewards episodes one by one",
            "give a recipe whose `reward` is of single episodes, or a benchmark, which has its own",
        )
    results: dict[str, Result] = {}
    kept = KeptEpisodes(evaluation.folder, evaluation.recipe)
    async with open_engines(evaluation.recipe, evaluation.folder / "logs") as engines:
        for suite in evaluation.suites:
            played = Tally(suite.name, 0)

            def seen(tally: Tally) -> None:
                nonlocal played
                played = tally
                show(tally)

            file, begun = RecordFile(evaluation.records(suite)), time.monotonic()
            try:
                async with open_stage(suite.recipe, engines, evaluation.folder) as stage:
                    found = await play_suite(
                        suite,
                        stage,
                        file,
                        samples=evaluation.samples,
                        seed=evaluation.seed,
                        at_once=suite.recipe.rollout.episodes,
                        show=seen,
                        kept=kept,
                    )
            finally:
                file.close()
                kept.close()
            results[suite.name] = _result(found, played.tokens, time.monotonic() - begun, evaluation.seed)
    write_json(evaluation.folder / REPORT, report(evaluation, results))
    return results


def _result(records: list[Record], tokens: int, seconds: float, seed: int) -> Result:
    return Result(score(records, seed=seed), fingerprint(records), tokens, round(seconds, 1))


def average(results: Mapping[str, Result]) -> float | None:
    """The mean of the benchmarks' avg@k, each counting the same; None where one has none."""
    found = [result.scores.average for result in results.values()]
    known = [one.value for one in found if one is not None]
    return fmean(known) if known and len(known) == len(found) else None


def report(evaluation: Evaluation, results: Mapping[str, Result]) -> dict[str, Any]:
    """All of it as JSON."""
    return {
        **evaluation.settings,
        "samples": evaluation.samples,
        "average": average(results),
        "benchmarks": {
            name: {
                **one.scores.plain(),
                "fingerprint": one.fingerprint,
                "played_tokens": one.tokens,
                "played_seconds": one.seconds,
            }
            for name, one in results.items()
        },
    }
