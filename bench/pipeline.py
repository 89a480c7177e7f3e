"""Five pipelines on the same work, with real processes and real compute on two workers, and their idle times.

naive, micro-batch, off-policy filling and asynchronous have one worker that rolls out and one that trains; multiplexed
has one that rolls out and one that does both. Each worker computes in one thread, so that on two cores they do not take
each other's time; the dataflow service and the storage unit need some of it too. Nothing is emulated. Answers have
long-tailed lengths, the same for all; a node decodes as many at once as a batch has. Sequences in flight keep their
cache when weights change, and if answers may be older than a version the bound is high: the longest take as long as ten
steps, on the worker that also trains longer still, and a bound below that would drop what is long.

    python -m bench.pipeline [--quick] [--only multiplexed,naive] [--runs FOLDER] [--json FILE]

The window is from the first token sampled to the last commit: start-up is not in it. Idle is the share of the window in
which a worker neither trains, nor samples at least one sequence, nor changes weights. A picture of each timeline is
left in the folder of its run. How cost grows: naive pays for the longest answer of every batch and then for the step;
micro-batch and filling for the larger of sampling and training; multiplexed for the mean of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench.common import Report, parser
from bench.pipeline_work import CONTEXT, make_model
from rillflow.observe.metrics import read_metrics
from rillflow.observe.timeline import Window, draw, report, timeline, whole

PIPELINES = ("naive", "microbatch", "filling", "asynchronous", "multiplexed")
IDLE_GOAL = 0.05
SPEED_GOAL = 2.0
GROUPS, GROUP = 8, 4
STALENESS = {"asynchronous": 16, "multiplexed": 16}  # of the others it is part of what they are
_REPO = Path(__file__).resolve().parents[1]
_PATIENCE = 900.0


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run: wall seconds of its window, the trained samples, and each worker's shares of
    time."""

    seconds: float
    samples: int
    tokens: int
    staleness: tuple[float, float]
    expired: int
    workers: dict[str, dict[str, float]]

    @property
    def idle(self) -> float:
        return statistics.mean(worker["idle"] for worker in self.workers.values())


def recipe(pipeline: str, model: Path, steps: int, **more: Any) -> dict[str, Any]:
    """The shipped pipeline, on this bench's work."""
    work = f"{Path(__file__).with_name('pipeline_work.py')}"
    made: dict[str, Any] = {
        "extends": f"pipeline_{pipeline}",
        "name": f"bench_{pipeline}",
        "policies": {
            "agent": {
                "model": str(model),
                "sampling": {"temperature": 1.0, "max_tokens": 900},
                "engine": {"slots": GROUPS * GROUP, "context": CONTEXT, "on_update": "keep"},
            }
        },
        "workflow": f"{work}:play",
        "reward": f"{work}:reward",
        "data": {
            "prompts": {"generator": f"{work}:prompts", "arguments": {"count": 4096, "seed": 1}},
            "heldout": None,
        },
        "dataflow": {"group_size": GROUP, "filters": []} | _staleness(pipeline),
        "trainer": {
            "steps": steps,
            "batch_groups": GROUPS,
            "lr": 1e-5,
            "micro_tokens": 2048,
            "checkpoint_every": 1000,
            "attention": "sdpa",
        },
        "rollout": {"episodes": GROUPS * GROUP, "episode_timeout": 300.0},
        "observe": {"trackers": {"tensorboard": False}, "plot": False},
    }
    return made | more


def _staleness(pipeline: str) -> dict[str, int]:
    return {"staleness": STALENESS[pipeline]} if pipeline in STALENESS else {}


def run(pipeline: str, model: Path, steps: int, runs: Path) -> Outcome:
    path = runs / f"{pipeline}.yaml"
    path.write_text(yaml.safe_dump(recipe(pipeline, model, steps)))
    home = runs / pipeline
    command = [sys.executable, "-m", "rillflow", "run", str(path), "--runs", str(home)]
    environment = os.environ | {"PYTHONPATH": f"{_REPO}{os.pathsep}{_REPO / 'src'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode != 0:
        raise SystemExit(f"{pipeline} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    (folder,) = home.iterdir()
    return read(folder, pipeline)


def read(folder: Path, pipeline: str) -> Outcome:
    steps = read_metrics(folder / "metrics.jsonl", "agent").of("agent")
    workers = timeline(folder)
    window = Window(whole(workers).begin, max(step["time"] for step in steps))
    draw(workers, folder / "timeline.png", f"{pipeline}: {window.seconds:.0f} s", window)
    summary = json.loads((folder / "summary.json").read_text())
    return Outcome(
        seconds=window.seconds,
        samples=sum(int(step["samples"]) for step in steps),
        tokens=sum(int(step["trained_tokens"]) for step in steps),
        staleness=(
            statistics.mean(step["staleness_mean"] for step in steps),
            max(step["staleness_max"] for step in steps),
        ),
        expired=int(summary["counts"].get("expired.stale", 0)),
        workers=report(workers, window),
    )


def show(outcomes: dict[str, Outcome]) -> None:
    table = Table(title="the same work, five pipelines")
    for heading in ("pipeline", "wall s", "samples/s", "tokens/s", "tokens/sample", "staleness", "stale", "idle"):
        table.add_column(heading, justify="left" if heading in {"pipeline", "idle"} else "right")
    for name, one in outcomes.items():
        table.add_row(
            name,
            f"{one.seconds:.1f}",
            f"{one.samples / one.seconds:.1f}",
            f"{one.tokens / one.seconds:.0f}",
            f"{one.tokens / one.samples:.0f}",
            f"{one.staleness[0]:.2f} mean, {one.staleness[1]:.0f} max",
            str(one.expired),
            ", ".join(f"{worker} {shares['idle']:.1%}" for worker, shares in one.workers.items()),
        )
    Console(stderr=True, width=150).print(table)


def summarise(outcomes: dict[str, Outcome], destination: str | None) -> None:
    bench = Report("pipeline")
    ours = outcomes["multiplexed"]
    for name, one in outcomes.items():
        if name != "multiplexed":
            goal = SPEED_GOAL if name == "naive" else None
            bench.add(f"wall time against {name}", ours.seconds, one.seconds, unit="s", goal=goal, less_is_better=True)
    for worker, shares in ours.workers.items():
        bench.add(
            f"idle share of {worker}, multiplexed, against the goal",
            max(shares["idle"], 1e-6), IDLE_GOAL, unit="", goal=1.0, less_is_better=True,
        )  # fmt: skip
    for name, one in outcomes.items():
        row = {
            "name": f"pipeline {name}", "seconds": one.seconds, "samples_per_second": one.samples / one.seconds,
            "tokens_per_second": one.tokens / one.seconds, "tokens_per_sample": one.tokens / one.samples,
            "staleness_mean": one.staleness[0], "staleness_max": one.staleness[1], "expired_stale": one.expired,
            "idle": one.idle, "workers": one.workers,
        }  # fmt: skip
        bench.results.append(row | dict.fromkeys(("ours", "peer", "unit", "ratio", "goal", "met")))
    bench.finish(destination)


def arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--only", help="some of the pipelines, with commas", default=",".join(PIPELINES))
    made.add_argument("--runs", type=Path, help="keep the runs, with their pictures, in this folder")
    made.add_argument("--steps", type=int, help="optimizer steps of each run")
    given = made.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - set(PIPELINES):
        made.error(f"there is no pipeline {', '.join(sorted(unknown))}: choose of {', '.join(PIPELINES)}")
    if given.json is not None and "multiplexed" not in chosen:
        made.error("--json compares the others with multiplexed: add it to --only")
    return given


def main() -> None:
    given = arguments()
    steps = given.steps or (8 if given.quick else 48)
    names = [name for name in PIPELINES if name in given.only.split(",")]
    runs = given.runs or Path(tempfile.mkdtemp(prefix="rillflow-pipeline-"))
    runs.mkdir(parents=True, exist_ok=True)
    try:
        model = make_model(runs / "model")
        outcomes = {}
        for name in names:
            shutil.rmtree(runs / name, ignore_errors=True)
            outcomes[name] = run(name, model, steps, runs)
            show(outcomes)
        if "multiplexed" in outcomes:
            summarise(outcomes, given.json)
    finally:
        if given.runs is None:
            shutil.rmtree(runs, ignore_errors=True)


if __name__ == "__main__":
    main()
