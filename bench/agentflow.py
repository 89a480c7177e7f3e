"""AgentFlow-Pro on the tally: does a process reward model (PRM-DAPO) teach more than the outcome alone?

    python -m bench.agentflow [--seeds 3] [--jobs 1] [--keep FOLDER] [--warm MODEL] [--quick] [--json FILE]

Real runs of the recipes. Once: a warm start (`fit agentflow_warm`). For every seed: labels by continuations of the warm
policy (`agentflow_labels`, `label`), a process reward model that starts from it (`fit agentflow_prm`), then the arms,
all from the same warm start:

outcome only    `agentflow`: every decision carries the episode's outcome (Flow-GRPO)
PRM-DAPO        `agentflow_pro`: several decisions from each state, rewarded by the model and a share of the outcome
no outcome      the same by the model alone, as the original
no results      the model does not read the results of earlier decisions
turn groups     one decision from each state, compared with those of the same turn in other episodes

No arm plays more episodes than `outcome only`; an arm with a process reward model pays for its labels, and each
continuation counts as an episode. With --keep the runs stay, and those that are there already are not made again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import Mean, Runs, asked, at_once, episodes, held_out, metric, table
from bench.common import Report, parser

PRM = "options.process_reward"
OUTCOME, PRO = "outcome only", "PRM-DAPO"
# What an arm with a process reward model changes in `agentflow_pro`, and the episodes of one of its steps.
ARMS: dict[str, tuple[list[str], int]] = {
    PRO: ([], 16),
    "no outcome": ([f"{PRM}.outcome=0"], 16),
    "no results": ([f"{PRM}.results=false"], 16),
    "turn groups": (
        [f"{PRM}.actions=1", "dataflow.grouping=turn", "dataflow.group_size=8", "trainer.batch_groups=8"],
        64,
    ),
}
STEPS, LABEL_STEPS, QUICK = 32, 6, 3
PER_STEP = 64  # episodes of a step of outcome only
REPEATS = 2


@dataclass(frozen=True)
class Arm:
    """What one run came to; `labels` are the episodes that its process reward model cost."""

    before: Mean
    after: Mean
    steps: int
    episodes: int
    labels: int
    calls: int  # answers of the planner that were trained on


class Bench:
    def __init__(self, runs: Runs, *, steps: int, label_steps: int, warm: Path | None, threads: int, few: bool) -> None:
        self._runs = runs
        self._steps = steps
        self._label_steps = label_steps
        self._given = warm
        self._threads = threads
        self._few = few

    def warm(self) -> Path:
        if self._given is not None:
            return self._given
        quick = ["trainer.steps=8"] if self._few else []
        return self._runs.made("warm", "fit", "agentflow_warm", f"runtime.threads={self._threads}", *quick) / "model"

    def labels(self, seed: int) -> Path:
        """Other prompts' order and other episodes than those of the arms: its seed is its own."""
        steps = [f"trainer.steps={self._label_steps}", "data.heldout=[]", f"seed={1000 + seed}"]
        return self._runs.made(
            f"labels-{seed}", "run", "agentflow_labels", *self._model(), *steps, "evaluation.every=0"
        )

    def label_episodes(self, seed: int) -> int:
        run = self.labels(seed)
        played = episodes(run)
        return round(played * (1 + statistics.fmean(metric(run, "episode/continuations"))))

    def prm(self, seed: int, *, results: bool) -> Path:
        name = f"prm-{seed}" if results else f"prm-blind-{seed}"
        train, held = (self._runs.folder / f"{name}-{part}.jsonl" for part in ("train", "heldout"))
        flag = "--results" if results else "--no-results"
        if not held.is_file():
            self._runs.rillflow("label", str(self.labels(seed)), "--out", str(train), "--heldout", str(held), flag)
        data = [f"data.train.path={train}", f"data.heldout.path={held}", f"seed={seed}", f"model={self.warm()}",
                f"runtime.threads={self._threads}"]  # fmt: skip
        quick = ["trainer.steps=2"] if self._few else []
        return self._runs.made(name, "fit", "agentflow_prm", *data, *quick) / "model"

    def quality(self, seed: int, *, results: bool) -> dict[str, float]:
        return dict(json.loads((self.prm(seed, results=results) / "rillflow.json").read_text())["quality"])

    def outcome_only(self, seed: int) -> Arm:
        return self._arm(OUTCOME, "agentflow", seed, steps=self._steps)

    def with_model(self, name: str, seed: int) -> Arm:
        changed, per_step = ARMS[name]
        model = self.prm(seed, results=name != "no results")
        labels = self.label_episodes(seed)
        steps = min(self._steps, max(1, (self._steps * PER_STEP - labels) // per_step))
        # Without the gate: what a model that ranks badly does is measured as well.
        more = [f"{PRM}.model={model}", f"{PRM}.gate=false", *changed]
        return self._arm(name, "agentflow_pro", seed, *more, steps=steps, labels=labels)

    def _arm(self, name: str, recipe: str, seed: int, *more: str, steps: int, labels: int = 0) -> Arm:
        few = ["data.heldout.arguments.count=16", "dataflow.filters=[]"] if self._few else []
        given = [f"seed={seed}", f"trainer.steps={steps}", f"trainer.checkpoint_every={steps}", "evaluation.every=0",
                 f"evaluation.repeats={REPEATS}", "observe.plot=false"]  # fmt: skip
        part = f"{name.replace(' ', '-')}-{seed}"
        run = self._runs.made(part, "run", recipe, *self._model(), *given, *more, *few)
        before, after = held_out(run)
        (trained,) = asked(run, "SELECT sum(samples) FROM steps WHERE state = 'live'")
        return Arm(before, after, steps, episodes(run), labels, int(trained[0]))

    def _model(self) -> list[str]:
        return [f"policies.planner.model={self.warm()}"]


def report(found: dict[str, list[Arm]], quality: dict[str, list[dict[str, float]]], destination: str | None) -> None:
    made = Report("agentflow")
    after = {name: statistics.fmean(one.after.value for one in arms) for name, arms in found.items()}
    before = statistics.fmean(one.before.value for arms in found.values() for one in arms)
    for name, arms in found.items():
        if name != OUTCOME:
            goal = 1.0 if name == PRO else None
            made.add(f"held-out reward, mean of seeds: {name} (peer: {OUTCOME})", after[name], after[OUTCOME] or None,
                     unit="reward", goal=goal)  # fmt: skip
        made.add(f"held-out reward, mean of seeds: {name} after (peer: before)", after[name], before or None,
                 unit="reward", goal=1.0)  # fmt: skip
        most = statistics.fmean(one.episodes + one.labels for one in arms)
        made.add(f"episodes with labels, mean of seeds: {name}", most, None, unit="episodes", reason="a count")
    more: dict[str, Any] = {
        "arms": {name: [_plain(one) for one in arms] for name, arms in found.items()},
        "process_reward_models": quality,
    }
    made.finish(destination, **more)
    print(table_of(found))
    for name, models in quality.items():
        ranks = ", ".join(f"{one['ranking']:.2f} ± {one['error']:.2f} ({one['states']:.0f})" for one in models)
        apart = ", ".join(f"{one['calibration']:.2f}" for one in models)
        print(f"process reward model, {name}: ranking {ranks}; calibration error {apart}")


def table_of(found: dict[str, list[Arm]]) -> str:
    rows = []
    for name, arms in found.items():
        single = ", ".join(f"{one.after.value:.2f} ± {one.after.error:.2f}" for one in arms)
        mean = {part: statistics.fmean(getattr(one, part) for one in arms) for part in ("episodes", "labels", "calls")}
        before, after = (Mean.of([getattr(one, part).value for one in arms]) for part in ("before", "after"))
        counts = [f"{arms[0].steps}", f"{mean['episodes']:.0f}", f"{mean['labels']:.0f}", f"{mean['calls']:.0f}"]
        rows.append([name, f"{before.value:.2f}", f"**{after.value:.2f}** ({single})", *counts])
    head = ["arm", "before", "after (each seed)", "steps", "episodes", "label episodes", "trained decisions"]
    return table(head, rows)


def _plain(arm: Arm) -> dict[str, Any]:
    means = {part: [getattr(arm, part).value, getattr(arm, part).error] for part in ("before", "after")}
    return means | {"steps": arm.steps, "episodes": arm.episodes, "labels": arm.labels, "trained": arm.calls}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, help="how many seeds; default 3, with --quick 1")
    arguments.add_argument("--steps", type=int, help="optimizer steps of outcome only, and the most of the other arms")
    arguments.add_argument("--label-steps", type=int, help="steps of the labelled run, eight episodes each")
    arguments.add_argument("--jobs", type=int, default=1, help="commands at once")
    arguments.add_argument("--threads", type=int, default=1, help="torch threads of a fit")
    arguments.add_argument("--warm", type=Path, help="model folder of a warm start that was made before")
    arguments.add_argument("--keep", type=Path, help="folder in which the runs stay")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        steps, label_steps = (QUICK, 1) if given.quick else (STEPS, LABEL_STEPS)
        bench = Bench(
            Runs(folder, given.jobs),
            steps=given.steps or steps,
            label_steps=given.label_steps or label_steps,
            warm=given.warm and given.warm.resolve(),
            threads=given.threads,
            few=given.quick,
        )
        seeds = range(given.seeds or (1 if given.quick else 3))
        work = [(OUTCOME, partial(bench.outcome_only, seed)) for seed in seeds]
        work += [(name, partial(bench.with_model, name, seed)) for name in ARMS for seed in seeds]
        done = at_once([one for _, one in work])
        found: dict[str, list[Arm]] = {}
        for (name, _), arm in zip(work, done, strict=True):
            found.setdefault(name, []).append(arm)
        quality = {
            "with results": [bench.quality(seed, results=True) for seed in seeds],
            "no results": [bench.quality(seed, results=False) for seed in seeds],
        }
        report(found, quality, given.json)


if __name__ == "__main__":
    main()
