"""AgentFlow's loop on the tally: does it learn, and does a process reward model (PRM-DAPO) beat the outcome alone?

    python -m bench.agentflow [--seeds 3] [--keep FOLDER] [--quick] [--json FILE]

Real runs of the recipes, one after the other, on a laptop's CPU. Once: a warm start (`fit agentflow_warm`). For every
seed: a collection run of the warm policy, its steps labelled by Monte-Carlo returns (`label`), a process reward model
(`fit agentflow_prm`); then, from the same warm start and with the same optimizer steps, groups and episodes,
`agentflow` (outcome only, Flow-GRPO) and `agentflow_pro` (PRM-DAPO). The episodes of the collection are reported
beside those of the arms: they are what the process reward model costs. With --keep the runs stay, and those that are
there already are not made again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.common import Report, parser

ARMS = ("agentflow", "agentflow_pro")
STEPS, COLLECT, QUICK = 24, 6, 4
WINDOW = 4  # steps over which the samples' reward is averaged, at both ends
LIMIT = 1800  # seconds of one command


@dataclass(frozen=True)
class Outcome:
    """Held-out reward before and after training, the mean reward of the first and the last steps' samples (the process
    reward model's, where there is one), and the training episodes that it took."""

    before: float
    after: float
    first: float
    last: float
    episodes: int


class Bench:
    def __init__(self, folder: Path, *, steps: int, collect: int) -> None:
        self._folder = folder
        self._steps = steps
        self._collect = collect

    def warm(self) -> Path:
        return self._made("warm", ["fit", "agentflow_warm"]) / "model"

    def arm(self, name: str, seed: int) -> Outcome:
        return outcome(self._made(f"{name}-{seed}", self._run(name, seed, self._steps)))

    def collection(self, seed: int) -> Outcome:
        return outcome(self._collection(seed))

    def _collection(self, seed: int) -> Path:
        """Other prompts' order and other episodes than those of the arms: its seed is its own."""
        return self._made(f"collect-{seed}", self._run("agentflow", 1000 + seed, self._collect))

    def _run(self, recipe: str, seed: int, steps: int) -> list[str]:
        command = ["run", recipe, f"policies.planner.model={self.warm()}", f"seed={seed}", f"trainer.steps={steps}"]
        model = [f"options.process_reward={self.prm(seed)}"] if recipe == "agentflow_pro" else []
        return [*command, "evaluation.every=0", "evaluation.repeats=2", *model]

    def prm(self, seed: int) -> Path:
        labels, held = self._folder / f"labels-{seed}.jsonl", self._folder / f"labels-heldout-{seed}.jsonl"
        if not labels.is_file():
            _rillflow(["label", str(self._collection(seed)), "--out", str(labels), "--heldout", str(held)])
        data = [f"data.train.path={labels}", f"data.heldout.path={held}", f"seed={seed}"]
        return self._made(f"prm-{seed}", ["fit", "agentflow_prm", *data]) / "model"

    def _made(self, part: str, command: Sequence[str]) -> Path:
        """The run folder of a part; played now unless it has been played to its end before."""
        runs = self._folder / part
        done = [run for run in sorted(runs.glob("*-*")) if _finished(run)]
        if not done:
            _rillflow([*command, "--runs", str(runs)])
            done = [run for run in sorted(runs.glob("*-*")) if _finished(run)]
        return done[-1]


def outcome(run: Path) -> Outcome:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = [event for event in events if event.get("event") == "evaluation"]
    rewards = [event["reward_mean"] for event in events if "reward_mean" in event]
    counts = json.loads((run / "summary.json").read_text())["counts"]
    groups = counts.get("trained", 0) + counts.get("filtered", 0)
    size = yaml.safe_load((run / "recipe.yaml").read_text())["dataflow"]["group_size"]
    first, last = (statistics.fmean(some) for some in (rewards[:WINDOW], rewards[-WINDOW:]))
    return Outcome(held[0]["reward"], held[-1]["reward"], first, last, groups * size)


def _finished(run: Path) -> bool:
    state = run / "state.json"
    return state.is_file() and json.loads(state.read_text()).get("state") == "finished"


def _rillflow(command: Sequence[str]) -> None:
    print("rillflow", *command, file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "rillflow", *command], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        sys.exit(f"rillflow {command[0]} {command[1]} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, help="how many seeds; default 3, with --quick 1")
    arguments.add_argument("--keep", type=Path, help="folder in which the runs stay")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        steps, collect = (QUICK, QUICK) if given.quick else (STEPS, COLLECT)
        bench = Bench(folder, steps=steps, collect=collect)
        found: dict[str, list[Outcome]] = {name: [] for name in (*ARMS, "collection")}
        for seed in range(given.seeds or (1 if given.quick else 3)):
            found["collection"].append(bench.collection(seed))
            for name in ARMS:
                found[name].append(bench.arm(name, seed))
        report(found, steps).finish(given.json)


def report(found: dict[str, list[Outcome]], steps: int) -> Report:
    made = Report("agentflow")
    for seed, (plain, pro) in enumerate(zip(found["agentflow"], found["agentflow_pro"], strict=True)):
        name = f"held-out reward after {steps} steps, seed {seed}: PRM-DAPO against outcome only"
        made.add(name, pro.after, plain.after or None, unit="reward")
    means = {name: statistics.fmean(one.after for one in ones) for name, ones in found.items()}
    before = statistics.fmean(one.before for name in ARMS for one in found[name])
    name = "held-out reward, mean of seeds: PRM-DAPO against outcome only"
    made.add(name, means["agentflow_pro"], means["agentflow"] or None, unit="reward")
    for name in ARMS:
        after = f"held-out reward, mean of seeds: {name} after against before"
        made.add(after, means[name], before or None, unit="reward", goal=1.0)
        first, last = (statistics.fmean(getattr(one, at) for one in found[name]) for at in ("first", "last"))
        made.add(f"reward of the samples it trains on, mean of seeds: {name}, last steps against first", last, first,
                 unit="reward")  # fmt: skip
    for name, ones in found.items():
        episodes = statistics.fmean(one.episodes for one in ones)
        made.add(f"training episodes of {name}, mean of seeds", episodes, None, unit="episodes", reason="none")
    return made


if __name__ == "__main__":
    main()
