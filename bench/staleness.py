"""What asynchrony costs: held-out reward against samples and against seconds, by staleness and by loss.

    python -m bench.staleness [--seeds 0 1 2] [--arms NAME …] [--steps 40] [--jobs 1] [--keep FOLDER] [--seconds N]
                              [--join FILE] [--redis URL] [--quick] [--json FILE] [--plot FILE]

Real runs of `recipes/stockroom.yaml` from the shipped tiny policy. Every arm makes as many optimizer steps of 128
samples each and is evaluated on the same held-out prompts:

on-policy             a batch is sampled, then trained on (one loss: with ratios of 1 they have the same gradient)
one step off          nodes sample a batch while the one before is trained on, then wait for its weights
staleness N           samples may be 1, 2, 4 or 8 versions old; GRPO, decoupled PPO, TIS and M2PO
half lr               staleness 4 with half the learning rate: is it the size of the steps?
staggered             staleness 4 and GRPO with four engines, of which at most two change their weights at once
Redis, four units     staleness 2 and GRPO with other storage; with --redis URL
PPO                   a critic, on-policy and at staleness 2 and 8

The trainer's step is emulated in one respect: it sleeps for `--pace` seconds (`bench.staleness_work`), as if it had a
device of its own. So sampling is faster than training, and samples are about as old as the bound allows. The table
gives the staleness that was measured. Sampling, gradients, losses and weights are real.

Seconds are those from the first prompt to a commit, with the pace in them. The reward to reach is the mean of five
steps' samples. With --keep, runs that are there already are not made again; with --seconds those that are finished in
time are reported. --join FILE adds the runs of a result file that another machine wrote, of other seeds.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import Mean, NotMade, Runs, asked, at_once, held_out, table
from bench.common import Report, parser
from rillflow.dataflow.audit import audit
from rillflow.observe.metrics import read_metrics

BATCH = 128  # samples of a step
ON_POLICY, REDIS = "on-policy", "staleness 2, GRPO, Redis"
LEVELS, WINDOW = (0.8, 0.9), 5  # training rewards to reach, and steps over which they are averaged
REPEATS = 2
_WORK = Path(__file__).with_name("staleness_work.py")
_FIRST = "SELECT min(admitted_at) FROM groups WHERE lane = 'train'"

LOSSES = {
    "GRPO": ("trainer.algorithm=grpo", "trainer.aggregation=token_mean"),
    "decoupled PPO": ("trainer.algorithm=decoupled_ppo",),
    "TIS": ("trainer.algorithm=grpo", "trainer.aggregation=token_mean", "trainer.truncate=2.0"),
    "M2PO": ("trainer.algorithm=m2po",),
}


@dataclass(frozen=True)
class Setting:
    """What an arm changes in a recipe."""

    loss: str
    staleness: int
    changes: tuple[str, ...] = ()
    recipe: str = "stockroom"


def _arms() -> dict[str, Setting]:
    grpo = LOSSES["GRPO"]
    wait = f"rollout.pause_after={{episodes: {BATCH}, at_most: 30}}"
    four = ("rollout.nodes=4", "rollout.episodes=16", "rollout.staggered=true")
    found = {ON_POLICY: Setting("GRPO", 0, grpo), "one step off": Setting("GRPO", 1, (*grpo, wait))}
    for staleness in (1, 2, 4, 8):
        for loss, changes in LOSSES.items():
            found[f"staleness {staleness}, {loss}"] = Setting(loss, staleness, changes)
    for loss, changes in LOSSES.items():
        found[f"staleness 4, {loss}, half lr"] = Setting(loss, 4, (*changes, "trainer.lr=2.5e-4"))
    found["staleness 2, GRPO, four units"] = Setting("GRPO", 2, (*grpo, "dataflow.units={count: 4}"))
    found[REDIS] = Setting("GRPO", 2, grpo)
    found["staleness 4, GRPO, staggered"] = Setting("GRPO", 4, (*grpo, *four))
    for staleness in (0, 2, 8):
        found[f"staleness {staleness}, PPO"] = Setting("PPO", staleness, recipe="ppo")
    return found


ARMS = _arms()
FEW = (ON_POLICY, "staleness 4, GRPO")  # with --quick


@dataclass(frozen=True)
class Point:
    """The policy after `step` steps: `samples` were trained, `seconds` have passed."""

    step: int
    samples: int
    seconds: float
    reward: float


@dataclass(frozen=True)
class Curve:
    """One run. `training` are the rewards of each step's samples, `heldout` those of evaluations."""

    seed: int
    after: Mean
    training: list[Point]
    heldout: list[Point]
    staleness_mean: float
    staleness_max: float
    expired: int

    @property
    def samples(self) -> int:
        return self.training[-1].samples

    @property
    def seconds(self) -> float:
        return self.training[-1].seconds

    def reached(self, level: float) -> Point | None:
        """Return the first step at which the mean training reward of WINDOW steps is at least `level`."""
        for end in range(WINDOW, len(self.training) + 1):
            if statistics.fmean(one.reward for one in self.training[end - WINDOW : end]) >= level:
                return self.training[end - 1]
        return None


class Bench:
    def __init__(self, runs: Runs, *, steps: int, pace: float, prompts: int, redis: str | None = None) -> None:
        self._runs = runs
        self._redis = redis
        self._steps = steps
        self._pace = pace
        self._prompts = prompts

    def curve(self, name: str, seed: int) -> Curve:
        run = self._runs.made(f"{name.replace(', ', '-').replace(' ', '_')}-{seed}", *self.command(name, seed))
        if not audit(run / "ledger.sqlite").balanced:
            raise RuntimeError(f"the audit of {run} does not balance")
        return read(run, seed)

    def command(self, name: str, seed: int) -> list[str]:
        setting = ARMS[name]
        node = f'{{function: "{_WORK}:pace", options: {{seconds: {self._pace}}}}}'
        given = [f"seed={seed}", f"dataflow.staleness={setting.staleness}", f"trainer.steps={self._steps}",
                 f"trainer.checkpoint_every={self._steps}", f"trainer.nodes=[{node}]", "dataflow.filters=[]",
                 "runtime.threads=1", f"evaluation.every={max(1, self._steps // 4)}",
                 f"evaluation.repeats={REPEATS}", f"data.heldout.arguments.count={self._prompts}",
                 "observe.plot=false"]  # fmt: skip
        storage = [f"dataflow.units={{kind: redis, redis: {self._redis!r}}}"] if name == REDIS else []
        return ["run", setting.recipe, *given, *setting.changes, *storage]


def read(run: Path, seed: int) -> Curve:
    """Return the curve of a finished run."""
    metrics = read_metrics(run / "metrics.jsonl", "agent")
    ((first,),) = asked(run, _FIRST)
    training: list[Point] = []
    for step in metrics.of("agent"):
        before = training[-1].samples if training else 0
        training.append(Point(step["step"], before + step["samples"], step["time"] - first, step["reward"]))
    at = {point.step: point for point in training} | {0: Point(0, 0, 0.0, 0.0)}
    heldout = [
        Point(one["step"], at[one["step"]].samples, at[one["step"]].seconds, one["reward"])
        for one in metrics.evaluations
    ]
    counts = json.loads((run / "summary.json").read_text())["counts"]
    return Curve(
        seed,
        held_out(run)[1],
        training,
        heldout,
        statistics.fmean(step["staleness_mean"] for step in metrics.of("agent")),
        max(step["staleness_max"] for step in metrics.of("agent")),
        int(counts.get("expired.stale", 0)),
    )


def joined(path: Path) -> dict[str, list[Curve]]:
    """Return the curves of a result file."""
    return {name: [_curve(run) for run in arm["runs"]] for name, arm in json.loads(path.read_text())["arms"].items()}


def _curve(run: dict[str, Any]) -> Curve:
    """Return the curve that `_plain` wrote."""
    lines = {part: [Point(*point) for point in run[part]] for part in ("training", "heldout")}
    plain = {part: run[part] for part in ("seed", "staleness_mean", "staleness_max", "expired")}
    return Curve(after=Mean(*run["after"]), **lines, **plain)


def report(found: dict[str, list[Curve]], pace: float, destination: str | None) -> None:
    made = Report("staleness")
    base = found.get(ON_POLICY)
    for name, curves in found.items():
        if base is None or name == ON_POLICY:
            continue
        made.add(f"held-out reward, mean of seeds: {name} (peer: {ON_POLICY})", _after(curves).value,
                 _after(base).value or None, unit="reward")  # fmt: skip
        made.add(f"seconds of a run, mean of seeds: {name} (peer: {ON_POLICY})", _mean(curves, "seconds"),
                 _mean(base, "seconds"), unit="s", less_is_better=True)  # fmt: skip
    made.finish(
        destination, pace_seconds=pace, batch=BATCH, arms={name: _plain(name, of) for name, of in found.items()}
    )
    print(table(HEAD, [row(name, _plain(name, curves)) for name, curves in found.items()]))


HEAD = ["arm", "staleness: mean, most", "held-out reward after (each seed)", "samples",
        *(f"samples / seconds to {level:g}" for level in LEVELS), "seconds"]  # fmt: skip


def row(name: str, arm: dict[str, Any]) -> list[str]:
    """Return an arm of the result file as the cells of a table."""
    runs: list[dict[str, Any]] = arm["runs"]
    after = Mean.of([one["after"][0] for one in runs])
    single = ", ".join(f"{one['after'][0]:.2f}" for one in runs)
    age = f"{statistics.fmean(one['staleness_mean'] for one in runs):.1f}, {max(one['staleness_max'] for one in runs)}"
    reached = [_reached([one["reached"][f"{level:g}"] for one in runs]) for level in LEVELS]
    seconds = statistics.fmean(one["seconds"] for one in runs)
    return [name, age, f"**{after.value:.2f}** ± {after.error:.2f} ({single})", f"{runs[0]['samples']:,}", *reached,
            f"{seconds:.0f}"]  # fmt: skip


def _reached(points: Sequence[dict[str, Any] | None]) -> str:
    """Return the means over the seeds that reached a reward, and how many did not."""
    there = [point for point in points if point is not None]
    if not there:
        return "not reached"
    samples, seconds = (statistics.fmean(point[key] for point in there) for key in ("samples", "seconds"))
    missed = f" ({len(there)} of {len(points)})" if len(there) < len(points) else ""
    return f"{samples:,.0f} / {seconds:.0f}{missed}"


def _after(curves: Sequence[Curve]) -> Mean:
    return Mean.of([curve.after.value for curve in curves])


def _mean(curves: Sequence[Curve], part: str) -> float:
    return statistics.fmean(getattr(curve, part) for curve in curves)


def _plain(name: str, curves: Sequence[Curve]) -> dict[str, Any]:
    setting = ARMS[name]
    runs = []
    for curve in curves:
        reached = {f"{level:g}": curve.reached(level) for level in LEVELS}
        whole = asdict(curve) | {"after": [curve.after.value, curve.after.error]}
        whole |= {
            part: [[*asdict(point).values()] for point in getattr(curve, part)] for part in ("training", "heldout")
        }
        whole |= {"samples": curve.samples, "seconds": curve.seconds}
        runs.append(whole | {"reached": {level: point and asdict(point) for level, point in reached.items()}})
    return {"loss": setting.loss, "staleness": setting.staleness, "changes": list(setting.changes), "runs": runs}


def draw(arms: dict[str, Any], path: Path) -> None:
    """Draw the arms of a result: the rewards of steps against samples and against seconds, means over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = [loss for loss in LOSSES if any(arm["loss"] == loss and arm["staleness"] for arm in arms.values())]
    figure = Figure(figsize=(4.2 * max(1, len(losses)), 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(2, max(1, len(losses)), squeeze=False, sharey=True)
    for column, loss in enumerate(losses):
        shown = {name: arm for name, arm in arms.items() if name == ON_POLICY or arm["loss"] == loss}
        for row_of, (part, label) in enumerate(((1, "trained samples"), (2, "seconds"))):
            axes = places[row_of][column]
            for name, arm in shown.items():
                points = list(zip(*(run["training"] for run in arm["runs"]), strict=False))
                across = [statistics.fmean(point[part] for point in step) for step in points]
                rewards = [statistics.fmean(point[3] for point in step) for step in points]
                smooth = [statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
                style = {"color": "black", "linestyle": "--"} if name == ON_POLICY else {}
                axes.plot(across, smooth, label=name.replace(f", {loss}", ""), **style)
            axes.set(xlabel=label, title=loss if part == 1 else "")
            axes.grid(alpha=0.3)
        places[0][column].legend(fontsize=7)
    for axes in places[:, 0]:
        axes.set_ylabel(f"training reward, mean of {WINDOW} steps")
    figure.savefig(path)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", help="one run of each arm for every seed; default 0 1 2")
    arguments.add_argument("--join", type=Path, help="a result file whose runs are reported, too")
    arguments.add_argument("--arms", nargs="+", choices=list(ARMS), help=f"default all; with --quick {', '.join(FEW)}")
    arguments.add_argument("--steps", type=int, help="optimizer steps of a run; default 40, with --quick 8")
    arguments.add_argument("--pace", type=float, default=2.0, help="seconds that a step sleeps")
    arguments.add_argument("--jobs", type=int, default=1, help="runs at once")
    arguments.add_argument("--keep", type=Path, help="folder in which the runs stay")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="stop then and report what is finished")
    arguments.add_argument("--redis", help=f"URL of a server, for the arm {REDIS!r}, which is left out otherwise")
    arguments.add_argument("--plot", type=Path, help="write the curves as a picture")
    given = arguments.parse_args()
    seeds = given.seeds or ([0] if given.quick else [0, 1, 2])
    names = given.arms or (list(FEW) if given.quick else list(ARMS))
    names = [name for name in names if given.redis or name != REDIS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            Runs(folder, given.jobs, given.seconds),
            steps=given.steps or (8 if given.quick else 40),
            pace=given.pace,
            prompts=32 if given.quick else 128,
            redis=given.redis,
        )
        # Seed by seed, so that a time limit leaves whole seeds and not whole arms.
        work = [(name, partial(bench.curve, name, seed)) for seed in seeds for name in names]
        found: dict[str, list[Curve]] = {name: [] for name in names}
        for (name, _), curve in zip(work, at_once([one for _, one in work]), strict=True):
            if curve is not None:
                found[name].append(curve)
    for name, curves in joined(given.join).items() if given.join else ():
        found[name] = sorted([*curves, *found.get(name, [])], key=lambda curve: curve.seed)
    found = {name: found[name] for name in ARMS if found.get(name)}
    if not found:
        raise NotMade("not even one run is finished")
    report(found, given.pace, given.json)
    if given.plot is not None:
        draw({name: _plain(name, curves) for name, curves in found.items()}, given.plot)


if __name__ == "__main__":
    main()
