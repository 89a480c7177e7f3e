"""Data algorithms at work: rollouts generated against reward reached.

    python -m bench.data_algorithms [--quick] [--seeds N …] [--steps N] [--json FILE] [--plot FILE]

Trains the quickstart's tiny policy for the same number of optimizer steps and from the same seeds with each of five
settings (vanilla, dynamic sampling, + replay 0.3, + replay 0.5, + GRESO), in the manner of AstraFlow's Figure 9
(arXiv 2605.15565, section 4.3). Rollouts are the episodes that had ended when the step was committed, counted in the
run's ledger.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Report, parser
from rillflow.dataflow.audit import audit

FILTER = "dataflow.filters=[zero_variance]"
VARIANTS: dict[str, tuple[str, ...]] = {
    "vanilla": ("dataflow.filters=[]",),
    "dynamic sampling": (FILTER,),
    "+ replay 0.3": (FILTER, "dataflow.sampler={replay: {ratio: 0.3}}"),
    "+ replay 0.5": (FILTER, "dataflow.sampler={replay: {ratio: 0.5}}"),
    "+ GRESO": (FILTER, "dataflow.curators=[greso]"),
}
# Few enough prompts that they are passed over more than once: GRESO judges a prompt by its earlier rounds.
PROMPTS = 256


@dataclass(frozen=True)
class Curve:
    """One training run: at every evaluation, the rollouts generated until then and the held-out reward."""

    rollouts: list[int]
    rewards: list[float]
    seconds: float

    @property
    def best(self) -> float:
        return max(self.rewards)

    def rollouts_to(self, reward: float) -> int | None:
        """Rollouts generated when the reward was first reached."""
        for count, found in zip(self.rollouts, self.rewards, strict=True):
            if found >= reward:
                return count
        return None


def train(variant: str, seed: int, steps: int, folder: Path) -> Curve:
    runs = folder / f"{variant.replace(' ', '_')}-{seed}"
    command = [
        *(sys.executable, "-m", "rillflow", "run", "stockroom", "--runs", str(runs)),
        *(f"seed={seed}", f"trainer.steps={steps}", "evaluation.every=3", "observe.plot=false"),
        f"data.prompts.arguments.count={PROMPTS}",
        *VARIANTS[variant],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (run,) = (path for path in runs.iterdir() if path.is_dir())
    ledger = run / "ledger.sqlite"
    if not audit(ledger).balanced:
        raise RuntimeError(f"the audit of {run} does not balance")
    return _curve(ledger, run / "metrics.jsonl")


def _curve(ledger: Path, metrics: Path) -> Curve:
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    committed = {line["step"]: line["time"] for line in lines if "event" not in line}
    evaluated = {line["step"]: line["reward"] for line in lines if line.get("event") == "evaluation"}
    steps = sorted(evaluated)
    with sqlite3.connect(ledger) as database:
        rollouts = [_ended(database, committed.get(step, 0.0)) for step in steps]
    times = sorted(committed.values())
    return Curve(rollouts, [evaluated[step] for step in steps], times[-1] - times[0])


def _ended(database: sqlite3.Connection, until: float) -> int:
    query = (
        "SELECT count(*) FROM attempts a JOIN groups g ON g.id = a.grp "
        "WHERE g.lane = 'train' AND a.state = 'done' AND a.ended_at <= ?"
    )
    return int(database.execute(query, (until,)).fetchone()[0])


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (variant, runs) in enumerate(curves.items()):
        for run in runs:
            label = variant if run is runs[0] else None
            axes.plot(run.rollouts, run.rewards, marker="o", markersize=3, color=f"C{number}", label=label)
    axes.set(xlabel="rollouts generated (episodes)", ylabel="held-out reward", title="The same optimizer steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def report_curves(report: Report, curves: dict[str, list[Curve]], target: float) -> None:
    """Medians over the seeds. Only rollouts compare: fewer for the same reward is better."""
    for variant, runs in curves.items():
        peers = curves["dynamic sampling"]
        report.add(
            f"{variant}: rollouts generated",
            statistics.median(run.rollouts[-1] for run in runs),
            statistics.median(run.rollouts[-1] for run in peers),
            unit="episodes (peer: dynamic sampling)",
            less_is_better=True,
        )
        report.add(f"{variant}: last reward", statistics.median(r.rewards[-1] for r in runs), None, unit="held-out")
        reached = [run.rollouts_to(target) for run in runs]
        if all(count is not None for count in reached):
            middle = statistics.median(count for count in reached if count is not None)
            report.add(f"{variant}: rollouts to reward {target}", middle, None, unit="episodes")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--plot", metavar="FILE", help="write the curves as a picture")
    arguments.add_argument("--target", type=float, default=0.8, help="held-out reward whose cost is compared")
    arguments.add_argument("--seeds", type=int, nargs="+", help="one training run of each setting for every seed")
    arguments.add_argument("--steps", type=int, help="optimizer steps of every run")
    given = arguments.parse_args()
    seeds, steps = ([7], 12) if given.quick else ([7, 11, 3], 30)
    seeds, steps = given.seeds or seeds, given.steps or steps
    report = Report("data_algorithms")
    curves: dict[str, list[Curve]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for variant, runs in curves.items():
                runs.append(train(variant, seed, steps, Path(folder)))
                print(f"{variant}, seed {seed}: {runs[-1]}", file=sys.stderr)
    report_curves(report, curves, given.target)
    if given.plot:
        draw(curves, Path(given.plot))
    report.finish(given.json)


if __name__ == "__main__":
    main()
