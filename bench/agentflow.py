"""AgentFlow-Pro on the tally: does a process reward model (PRM-DAPO) teach more than the outcome alone?

    python -m bench.agentflow [--seeds 3] [--first-seed 0] [--arms NAME …] [--jobs 1] [--keep FOLDER] [--warm MODEL]
                              [--quick] [--seconds N] [--json FILE]

Real runs of the recipes. Once: a warm start (`fit agentflow_warm`). For every seed: a first round by outcomes
(`agentflow`), whose own episodes are labelled (`label`), and a process reward model on these labels (`fit
agentflow_prm`), which starts from the planner of the first round. Then the arms, which all start from that planner:

outcome only     `agentflow` goes on: every decision carries the episode's outcome (Flow-GRPO)
PRM-DAPO         `agentflow_pro`: several decisions from each state, compared by the model and by known outcomes; a
                 judge has labelled (`bench.agentflow_judge`)
outcome labels   the same, with a model that was fitted to the outcomes of the first round's episodes
no outcome       PRM-DAPO by the model's scores alone, as the original
no results       the model does not read the results of earlier decisions
turn groups      one decision from each state, compared with those of the same turn in other episodes
scaled groups    advantages divided by the standard deviation of each state's scores, as the original
constant scores  PRM-DAPO with a model that gives every decision the same score: what known outcomes do alone
unbalanced judge the judge's labels as frequent as they are, and as many steps of the fit as labels by returns get
outcome only, 32 outcome only with as many optimizer steps as the arms with a model; it plays more episodes than they

No other arm plays more episodes than `outcome only`, the first round counted. The labels cost no episodes. With --keep
the runs stay, and those that are there already are not made again; with --seconds those that are finished in time are
reported, and the next call goes on.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.agentflow_judge import MODEL, serving
from bench.arms import Mean, NotMade, Runs, asked, at_once, episodes, held_out, table
from bench.common import Report, parser
from rillflow.agents.agentflow.labels import collect
from rillflow.runtime.folder import RunFolder

PRM = "options.process_reward"
FIRST, OUTCOME, PRO = "first round", "outcome only", "PRM-DAPO"
LONGER = "outcome only, 32"


@dataclass(frozen=True)
class Setting:
    """What an arm with a process reward model changes in `agentflow_pro`, and the episodes of one of its steps.

    Scores that are compared with outcomes have to be probabilities: without `balance` there are as many good rows as
    there were. A `constant` model has a head of zeros.
    """

    changes: tuple[str, ...] = ()
    per_step: int = 16
    labels: str = "judge"
    results: bool = True
    balance: bool = True
    constant: bool = False

    @property
    def model(self) -> str:
        """Return the name of its process reward model, which arms share."""
        parts = [self.labels, "" if self.balance else "unbalanced", "" if self.results else "blind"]
        return "-".join(part for part in parts if part)


ARMS = {
    PRO: Setting(),
    "outcome labels": Setting(labels="returns", balance=False),
    "no outcome": Setting((f"{PRM}.outcome=0",)),
    "no results": Setting(results=False),
    "turn groups": Setting(
        (f"{PRM}.actions=1", "dataflow.grouping=turn", "dataflow.group_size=8", "trainer.batch_groups=8"), 64
    ),
    "scaled groups": Setting(("trainer.advantage=grpo",)),
    "constant scores": Setting(constant=True),
    "unbalanced judge": Setting(balance=False),
}
PER_STEP = 64  # episodes of a step of outcome only
HEAD = "score.weight"  # of a process reward model
REPEATS = 2
_LEFT = re.compile(r"(\d+) more\Z")


@dataclass(frozen=True)
class Size:
    """Optimizer steps: of the first round, of outcome only after it, and the most of an arm with a model."""

    first: int = 10
    outcome: int = 22
    model: int = 32


@dataclass(frozen=True)
class Arm:
    """What one run came to; `calls` are the answers of the planner that were trained on."""

    before: Mean
    after: Mean
    steps: int
    episodes: int
    calls: int


class Bench:
    def __init__(self, runs: Runs, judge: str, *, size: Size, warm: Path | None, threads: int, few: bool) -> None:
        self._runs = runs
        self._judge = judge
        self._size = size
        self._given = warm
        self._threads = threads
        self._few = few

    def warm(self) -> Path:
        if self._given is not None:
            return self._given
        quick = ["trainer.steps=8", "trainer.batch_groups=32", "data.train.arguments.count=512"] if self._few else []
        return self._runs.made("warm", "fit", "agentflow_warm", f"runtime.threads={self._threads}", *quick) / "model"

    def first_round(self, seed: int) -> Arm:
        run = self._first(seed)
        return self._arm(run, self._size.first, held_out(run)[0])

    def outcome_only(self, seed: int, name: str = OUTCOME) -> Arm:
        steps = self._size.model if name == LONGER else self._size.outcome
        run = self._run(_part(name, seed), "agentflow", seed, steps, self._planner(seed))
        return self._arm(run, steps, self._start(seed))

    def with_model(self, name: str, seed: int) -> Arm:
        setting = ARMS[name]
        # Without the gate: what a model that ranks badly does is measured as well.
        model = self._flat(seed, setting) if setting.constant else self.prm(seed, setting)
        more = [f"{PRM}.model={model}", f"{PRM}.gate=false"]
        more += [] if setting.results else [f"{PRM}.results=false"]
        steps = min(self._size.model, max(1, self._size.outcome * PER_STEP // setting.per_step))
        run = self._run(_part(name, seed), "agentflow_pro", seed, steps, self._planner(seed), *more, *setting.changes)
        return self._arm(run, steps, self._start(seed))

    def prm(self, seed: int, setting: Setting) -> Path:
        name = f"prm-{setting.model}-{seed}"
        train = self._runs.folder / f"{name}-train.jsonl"
        words = ["label", str(self._first(seed)), "--out", str(train), "--heldout", "{}", "--by", setting.labels]
        words += ["--results" if setting.results else "--no-results"]
        words += [] if setting.balance else ["--no-balance"]
        words += ["--url", self._judge, "--model", MODEL] if setting.labels == "judge" else []
        held = self._runs.written(f"{name}-heldout.jsonl", *words)
        # Single outcomes are noisy: fewer passes over them.
        steps = 2 if self._few else 240 if setting.balance else 100
        data = [f"data.train.path={train}", f"data.heldout.path={held}", f"seed={seed}", f"trainer.steps={steps}",
                f"model={self._planner(seed)}", f"runtime.threads={self._threads}"]  # fmt: skip
        return self._runs.made(name, "fit", "agentflow_prm", *data) / "model"

    def _flat(self, seed: int, setting: Setting) -> Path:
        """Return a copy of a process reward model whose head is zero, so that it scores everything alike."""
        from safetensors.numpy import load_file, save_file

        model = self.prm(seed, setting)
        flat = self._runs.folder / f"prm-constant-{seed}"
        if not flat.is_dir():
            shutil.copytree(model, flat)
            weights = load_file(model / "model.safetensors")
            save_file({name: array * (name != HEAD) for name, array in weights.items()}, flat / "model.safetensors")
        return flat

    def quality(self, seed: int, setting: Setting) -> dict[str, float]:
        return dict(json.loads((self.prm(seed, setting) / "rillflow.json").read_text())["quality"])

    def rewards(self, name: str, seed: int) -> dict[str, dict[str, list[float]]]:
        """Return the number of decisions and their mean reward, by action and steps left, of an arm's whole run."""
        run = self._runs.made(_part(name, seed))
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for episode in collect(RunFolder.open(run).recipe, run).episodes:
            for state in episode.states:
                left = _LEFT.search(state.prompt)
                for decision, reward in state.decisions:
                    if left is not None and reward is not None:
                        found[decision.action][left[1]].append(reward)
        return {
            action: {left: [len(rewards), statistics.fmean(rewards)] for left, rewards in sorted(of.items())}
            for action, of in sorted(found.items())
        }

    def _first(self, seed: int) -> Path:
        """Its seed is not that of the arms: they play the prompts in another order."""
        return self._run(_part(FIRST, seed), "agentflow", 1000 + seed, self._size.first, self.warm())

    def _start(self, seed: int) -> Mean:
        """Return the held-out reward of the planner that the arms start from. An arm's own first evaluation goes on
        while it trains, so that a part of it is of later weights."""
        return held_out(self._first(seed))[1]

    def _planner(self, seed: int) -> Path:
        return self._runs.exported(self._first(seed))

    def _run(self, part: str, recipe: str, seed: int, steps: int, model: Path, *more: str) -> Path:
        few = ["data.heldout.arguments.count=8", "dataflow.filters=[]"] if self._few else []
        given = [f"policies.planner.model={model}", f"seed={seed}", f"trainer.steps={steps}",
                 f"trainer.checkpoint_every={steps}", "evaluation.every=0", f"evaluation.repeats={REPEATS}",
                 "observe.plot=false"]  # fmt: skip
        return self._runs.made(part, "run", recipe, *given, *more, *few)

    def _arm(self, run: Path, steps: int, before: Mean) -> Arm:
        (trained,) = asked(run, "SELECT sum(samples) FROM steps WHERE state = 'live'")
        arm = Arm(before, held_out(run)[1], steps, episodes(run), int(trained[0]))
        print(f"{run.parent.name}: {arm.before} -> {arm.after}", file=sys.stderr, flush=True)
        return arm


def _part(name: str, seed: int) -> str:
    return f"{name.replace(' ', '-')}-{seed}"


def report(
    found: dict[str, list[Arm]],
    quality: dict[str, list[dict[str, float]]],
    rewards: dict[str, Any],
    destination: str | None,
) -> None:
    made = Report("agentflow")
    first = found[FIRST]
    after = {name: statistics.fmean(one.after.value for one in arms) for name, arms in found.items()}
    for name, arms in found.items():
        before = statistics.fmean(one.before.value for one in arms)
        if name not in (FIRST, OUTCOME) and OUTCOME in after:
            made.add(f"held-out reward, mean of seeds: {name} (peer: {OUTCOME})", after[name], after[OUTCOME] or None,
                     unit="reward", goal=1.0 if name == PRO else None)  # fmt: skip
        made.add(f"held-out reward, mean of seeds: {name} after (peer: before)", after[name], before or None,
                 unit="reward", goal=1.0)  # fmt: skip
        played = statistics.fmean(one.episodes for one in arms)
        played += 0 if name == FIRST else statistics.fmean(one.episodes for one in first)
        made.add(f"episodes with the first round, mean of seeds: {name}", played, None, unit="episodes",
                 reason="a count")  # fmt: skip
    more: dict[str, Any] = {
        "arms": {name: [_plain(one) for one in arms] for name, arms in found.items()},
        "process_reward_models": quality,
        "rewards_by_action": rewards,
    }
    made.finish(destination, **more)
    print(table_of(found))
    for name, models in quality.items():
        ranks = ", ".join(f"{one['ranking']:.2f} ± {one['error']:.2f} ({one['states']:.0f})" for one in models)
        apart = ", ".join(f"{one['calibration']:.2f}" for one in models)
        print(f"process reward model, {name}: ranking {ranks}; calibration error {apart}")
    for name, of in rewards.items():
        print(f"{name}, first seed: decisions and their mean reward by steps left")
        for action, lefts in of.items():
            print(f"  {action:8}", *(f"{left}: {count:.0f} × {mean:.2f}" for left, (count, mean) in lefts.items()))


def table_of(found: dict[str, list[Arm]]) -> str:
    rows = []
    for name, arms in found.items():
        single = ", ".join(f"{one.after.value:.2f} ± {one.after.error:.2f}" for one in arms)
        mean = {part: statistics.fmean(getattr(one, part) for one in arms) for part in ("episodes", "calls")}
        before, after = (Mean.of([getattr(one, part).value for one in arms]) for part in ("before", "after"))
        counts = [f"{arms[0].steps}", f"{mean['episodes']:.0f}", f"{mean['calls']:.0f}"]
        rows.append([name, f"{before.value:.2f}", f"**{after.value:.2f}** ({single})", *counts])
    return table(["arm", "before", "after (each seed)", "steps", "episodes", "trained decisions"], rows)


def _plain(arm: Arm) -> dict[str, Any]:
    means = {part: [getattr(arm, part).value, getattr(arm, part).error] for part in ("before", "after")}
    return means | {"steps": arm.steps, "episodes": arm.episodes, "trained": arm.calls}


def qualities(bench: Bench, arms: list[str], seeds: range) -> dict[str, list[dict[str, float]]]:
    """Return how good the process reward models of these arms are, by their labels and text."""
    found: dict[str, list[dict[str, float]]] = {}
    for name in arms:
        setting = ARMS[name]
        if setting.constant:
            continue
        of = f"labels by {setting.labels}{'' if setting.results else ', no results'}"
        of += ", unbalanced" if setting.labels == "judge" and not setting.balance else ""
        if of not in found:
            measured = at_once([partial(bench.quality, seed, setting) for seed in seeds])
            found[of] = [one for one in measured if one is not None]
    return found


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, help="how many seeds; default 3, with --quick 1")
    arguments.add_argument("--first-seed", type=int, default=0, help="default 0")
    arguments.add_argument("--arms", nargs="+", choices=[*ARMS, LONGER], help=f"default all; with --quick {PRO}")
    arguments.add_argument("--jobs", type=int, default=1, help="commands at once")
    arguments.add_argument("--threads", type=int, default=1, help="torch threads of a fit")
    arguments.add_argument("--warm", type=Path, help="model folder of a warm start that was made before")
    arguments.add_argument("--keep", type=Path, help="folder in which the runs stay")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="stop then and report what is finished")
    given = arguments.parse_args()
    seeds = range(given.first_seed, given.first_seed + (given.seeds or (1 if given.quick else 3)))
    chosen = given.arms or ([PRO] if given.quick else [*ARMS, LONGER])
    arms = [name for name in chosen if name in ARMS]
    with tempfile.TemporaryDirectory() as temporary, serving() as judge:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            Runs(folder, given.jobs, given.seconds),
            judge,
            size=Size(1, 1, 2) if given.quick else Size(),
            warm=given.warm and given.warm.resolve(),
            threads=given.threads,
            few=given.quick,
        )
        work = [(FIRST, partial(bench.first_round, seed)) for seed in seeds]
        work += [(OUTCOME, partial(bench.outcome_only, seed)) for seed in seeds]
        if LONGER in chosen:
            work += [(LONGER, partial(bench.outcome_only, seed, LONGER)) for seed in seeds]
        work += [(name, partial(bench.with_model, name, seed)) for name in arms for seed in seeds]
        found: dict[str, list[Arm]] = {}
        for (name, _), arm in zip(work, at_once([one for _, one in work]), strict=True):
            if arm is not None:
                found.setdefault(name, []).append(arm)
        if FIRST not in found:
            raise NotMade("not even a first round is finished")
        looks = at_once([partial(bench.rewards, name, seeds[0]) for name in arms])
        rewards = {name: look for name, look in zip(arms, looks, strict=True) if look}
        report(found, qualities(bench, arms, seeds), rewards, given.json)


if __name__ == "__main__":
    main()
