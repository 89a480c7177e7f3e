"""Every shipped recipe with what it learns: before, after, interval, seeds, samples, seconds, machine and command.

    python -m bench.recipes [--only NAME …] [--seeds 3] [--jobs 1] [--keep FOLDER] [--seconds N] [--quick]
                            [--json bench/results/recipes.json]

Runs the recipes that need nothing but a CPU, as they are shipped, each from its warm start where it has one. Rows of
other recipes, and of those that are not finished in time, stay as they are in `bench/results/recipes.json`; docs/
results.md is made from that file by `python -m scripts.reference_pages`. A row without a number says why in `reason`.

`rillflow run` recipes are measured by the reward of held-out prompts, `rillflow fit` recipes by the loss or accuracy
on held-out rows. The interval is half of the 95 % interval: over seeds where there are several, else over prompts.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import Mean, Runs, asked, at_once, held_out
from bench.common import Report, machine, parser
from bench.registry import ROOT
from rillflow.config.load import parse

RECORDED = ROOT / "bench" / "results" / "recipes.json"
FIRST_SEED = 7
REWARD = "held-out reward"
_SAMPLES = "SELECT sum(samples) FROM steps WHERE state = 'live'"


@dataclass(frozen=True)
class Start:
    """A warm start: the recipe that `fit` runs and the policies that begin with its model."""

    recipe: str = ""
    policies: tuple[str, ...] = ("agent",)


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    before: float
    after: Mean
    samples: int
    seconds: float


FITS = (
    "sft", "reward_model", "process_reward", "household_sft", "shop_sft", "recursive_warm", "reasoning_warm",
    "formulas_warm", "pairs_warm", "agentflow_warm",
)  # fmt: skip
FRESH = Start()
RUNS = {
    "stockroom": FRESH,
    "quickstart": FRESH,
    "quickstart_colocated": FRESH,
    "stockroom_ranked": FRESH,
    "ppo": FRESH,
    "ppo_colocated": FRESH,
    "pipeline_naive": FRESH,
    "pipeline_microbatch": FRESH,
    "pipeline_filling": FRESH,
    "pipeline_asynchronous": FRESH,
    "pipeline_multiplexed": FRESH,
    "staged": FRESH,
    "two_agents": FRESH,
    "two_policies": FRESH,
    "mcp_stdio": FRESH,
    "command_agent": FRESH,
    "household": Start("household_sft"),
    "shop": Start("shop_sft"),
    "reasoning_cpu": Start("reasoning_warm"),
    "recursive": Start("recursive_warm", ("solver",)),
    "formulas": Start("formulas_warm", ("solver",)),
    "solver_selector": Start("formulas_warm", ("solver", "selector")),
    "solver_tester": Start("formulas_warm", ("solver", "tester")),
    "pairs": Start("pairs_warm", ("solver",)),
    "solver_verifier": Start("pairs_warm", ("solver", "verifier")),
    "agentflow": Start("agentflow_warm", ("planner",)),
}
MEASURED = (*FITS, *RUNS)
QUICK = ("quickstart", "sft")


def shipped() -> dict[str, Path]:
    """Return the files of all shipped recipes by their path under `recipes`, less the suffix."""
    folder = ROOT / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


class Bench:
    def __init__(self, runs: Runs, *, few: bool) -> None:
        self._runs = runs
        self._few = few

    def measure(self, name: str, seed: int) -> Result:
        return self._fitted(self._fit(name, seed)) if name in FITS else self._played(name, seed)

    def _fit(self, name: str, seed: int) -> Path:
        few = ["trainer.steps=4"] if self._few else []
        return self._runs.made(f"{name}-{seed}", "fit", name, f"seed={seed}", "runtime.threads=1", *few)

    def _fitted(self, run: Path) -> Result:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seen = [line for line in lines if line.get("event") == "evaluation"]
        steps = [line for line in lines if "event" not in line]
        key = "accuracy" if "accuracy" in seen[0] else "loss"
        rows = parse(run / "recipe.yaml")["trainer"]["batch_groups"] * len(steps)
        return Result(seen[0][key], Mean(seen[-1][key], 0.0), rows, lines[-1]["time"] - lines[0]["time"])

    def _played(self, name: str, seed: int) -> Result:
        start = RUNS[name]
        few = ["trainer.steps=2", "data.heldout.arguments.count=8"] if self._few else []
        given = [f"seed={seed}", "runtime.threads=1", "observe.plot=false", *few]
        if start.recipe:
            model = self._fit(start.recipe, FIRST_SEED) / "model"
            given += [f"policies.{policy}.model={model}" for policy in start.policies]
        run = self._runs.made(f"{name}-{seed}", "run", name, *given)
        before, after = held_out(run)
        ((samples,),) = asked(run, _SAMPLES)
        seconds = json.loads((run / "summary.json").read_text())["seconds"]
        return Result(before.value, after, int(samples), seconds)


def row(name: str, results: list[Result]) -> dict[str, Any]:
    """Return what the result file says of a recipe."""
    after = Mean.of([one.after.value for one in results])
    interval = after.error if len(results) > 1 else results[0].after.error or None
    fit = name in FITS
    return {
        "measure": ("held-out accuracy" if "reward" in name else "held-out loss") if fit else REWARD,
        "before": statistics.fmean(one.before for one in results),
        "after": after.value,
        "interval": interval,
        "each": [one.after.value for one in results],
        "seeds": len(results),
        "samples": round(statistics.fmean(one.samples for one in results)),
        "seconds": round(statistics.fmean(one.seconds for one in results), 1),
        "machine": _machine(),
        "command": f"rillflow {'fit' if fit else 'run'} {name}",
        "start": None if fit else RUNS[name].recipe or None,
        "reason": "one seed: no interval" if interval is None else None,
    }


def _machine() -> str:
    found = machine()
    return f"{found['cpu']}, {found['cores']} cores, {found['arch']}"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", nargs="+", choices=MEASURED, metavar="NAME", help="recipes; default all on a CPU")
    arguments.add_argument("--seeds", type=int, help="how many seeds; default 3, with --quick 1")
    arguments.add_argument("--jobs", type=int, default=1, help="commands at once")
    arguments.add_argument("--keep", type=Path, help="where runs stay; those that are there are not made again")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="stop then and report what is finished")
    given = arguments.parse_args()
    names = given.only or (QUICK if given.quick else MEASURED)
    seeds = range(FIRST_SEED, FIRST_SEED + (given.seeds or (1 if given.quick else 3)))
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Runs((given.keep or Path(temporary)).resolve(), given.jobs, given.seconds), few=given.quick)
        work = [(name, partial(_tried, bench, name, seed)) for seed in seeds for name in names]
        found: dict[str, list[Result]] = {}
        for (name, _), result in zip(work, at_once([one for _, one in work]), strict=True):
            if result is not None:
                found.setdefault(name, []).append(result)
    made = Report("recipes")
    rows = json.loads(RECORDED.read_text())["recipes"]
    for name, results in found.items():
        rows[name] = row(name, results)
        lower = rows[name]["measure"] == "held-out loss"
        made.add(f"{name}: {rows[name]['measure']} after (peer: before)", rows[name]["after"],
                 rows[name]["before"] or None, unit="", less_is_better=lower)  # fmt: skip
    made.finish(given.json, recipes=dict(sorted(rows.items())))


def _tried(bench: Bench, name: str, seed: int) -> Result | None:
    """Return a result; None, with the reason on stderr, for a recipe that fails: the others are measured all the
    same."""
    try:
        return bench.measure(name, seed)
    except RuntimeError as error:
        print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return None


if __name__ == "__main__":
    main()
