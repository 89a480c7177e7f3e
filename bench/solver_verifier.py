"""A solver and a verifier that learn at once, against the solver alone and against taking turns.

    python -m bench.solver_verifier [--quick] [--seeds N …] [--steps N] [--turn N] [--keep FOLDER] [--json FILE]

Real runs of `recipes/solver_verifier.yaml` from one supervised warm start (`recipes/digits_warm.yaml`), for each seed:

pair    both policies train at once
alone   the solver alone (`recipes/digits.yaml`) until it has trained on as many samples as the pair's solver
turns   the pair, but only one policy trains at a time, `--turn` steps each, the other waits (`rillflow resume`)

Rewards are those of held-out prompts, four episodes of each; the trajectory's reward is the solver's last answer's, end
to end. Seconds are from the first episode's beginning to the last step's end; for turns those of all turns added, the
starts of processes left out. With `--keep`, runs that are there already are not made again.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.common import Report, parser
from rillflow.dataflow.audit import audit

POLICIES = ("solver", "verifier")
REPEATS = 4
_ROUND = (
    "SELECT avg(s.reward) FROM samples s JOIN groups g ON g.id = s.grp "
    "WHERE g.lane = 'eval' AND g.round = ? AND s.agent = ? AND s.turn = 0"
)
_BEGAN = (
    "SELECT min(a.leased_at) FROM attempts a JOIN groups g ON g.id = a.grp WHERE g.lane = 'train' AND a.leased_at > ?"
)


@dataclass(frozen=True)
class Found:
    """What a run came to. The held-out rewards are those before and after it."""

    trajectory: tuple[float, float]
    first: tuple[float, float] | None  # of the solver's first answers
    verifier: tuple[float, float] | None
    samples: int  # of the solver, trained
    seconds: float


class Runs:
    """The runs of the benchmark, each in a folder of its own under `folder`."""

    def __init__(self, folder: Path, steps: int, turn: int) -> None:
        self._folder = folder
        self._steps = steps
        self._turn = turn

    def warm(self) -> Path:
        """The model that all begin with."""
        made = self._made("warm")
        if made is None or not (made / "model").is_dir():
            _rillflow("fit", "digits_warm", "--runs", str(self._folder / "warm"))
            made = self._made("warm")
        assert made is not None
        return made / "model"

    def pair(self, seed: int) -> Found:
        return found(self._run(f"pair-{seed}", "solver_verifier", seed, POLICIES, f"trainer.steps={self._steps}"))

    def alone(self, seed: int, samples: int) -> Found:
        """Batches of the solver alone have 64 samples each: group_size times batch_groups."""
        steps = math.ceil(samples / 64)
        return found(self._run(f"alone-{seed}", "digits", seed, POLICIES[:1], f"trainer.steps={steps}"))

    def turns(self, seed: int) -> float:
        """Seconds. The second policy makes its first step beside the first one's: a trainer has at least one."""
        name, note = f"turns-{seed}", self._folder / f"turns-{seed}" / "seconds.json"
        if note.is_file():
            return float(json.loads(note.read_text()))
        shutil.rmtree(note.parent, ignore_errors=True)  # of turns that were cut short
        goal = {"solver": min(self._turn, self._steps), "verifier": 1}
        given = [f"policies.{policy}.trainer.steps={steps}" for policy, steps in goal.items()]
        began = time.time()
        run = self._run(name, "solver_verifier", seed, POLICIES, *given)
        seconds, mine = busy_seconds(run, began), 1
        while any(steps < self._steps for steps in goal.values()):
            policy = POLICIES[mine]
            goal[policy] = min(goal[policy] // self._turn * self._turn + self._turn, self._steps)
            _set_steps(run / "recipe.yaml", goal)
            began = time.time()
            _rillflow("resume", str(run))
            seconds, mine = seconds + busy_seconds(run, began), 1 - mine
        note.write_text(json.dumps(seconds))
        return seconds

    def _run(self, name: str, recipe: str, seed: int, policies: Sequence[str], *overrides: str) -> Path:
        made = self._made(name)
        if made is None or not (made / "summary.json").is_file():
            model = self.warm()
            given = [f"seed={seed}", f"evaluation.repeats={REPEATS}", "observe.plot=false", *overrides]
            models = [f"policies.{policy}.model={model}" for policy in policies]
            _rillflow("run", recipe, "--runs", str(self._folder / name), *given, *models)
            made = self._made(name)
        assert made is not None
        if not audit(made / "ledger.sqlite").balanced:
            raise RuntimeError(f"the audit of {made} does not balance")
        return made

    def _made(self, name: str) -> Path | None:
        """The newest run of this name: one that was cut short is not taken up again."""
        folder = self._folder / name
        runs = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        return runs[-1] if runs else None


def found(run: Path) -> Found:
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        rounds = ledger.execute("SELECT id, reward FROM rounds WHERE state = 'ended' ORDER BY id").fetchall()
        ends = (rounds[0], rounds[-1])
        first, verifier = (
            tuple(ledger.execute(_ROUND, (number, agent)).fetchone()[0] for number, _ in ends) for agent in POLICIES
        )
        query = "SELECT sum(samples) FROM steps WHERE policy = 'solver' AND state = 'live'"
        (samples,) = ledger.execute(query).fetchone()
    return Found((ends[0][1], ends[1][1]), _known(first), _known(verifier), samples, busy_seconds(run, 0.0))


def _known(pair: tuple[Any, ...]) -> tuple[float, float] | None:
    return None if None in pair else (float(pair[0]), float(pair[1]))


def busy_seconds(run: Path, since: float) -> float:
    """From the first training episode's beginning to the last step's end, of those after `since`."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        (began,) = ledger.execute(_BEGAN, (since,)).fetchone()
        (ended,) = ledger.execute("SELECT max(at) FROM steps WHERE at > ?", (since,)).fetchone()
    return float(ended - began)


def _set_steps(path: Path, goal: dict[str, int]) -> None:
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    for policy, steps in goal.items():
        recipe["policies"][policy]["trainer"]["steps"] = steps
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))


def _rillflow(*words: str) -> None:
    command = [sys.executable, "-m", "rillflow", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def report_rewards(report: Report, seed: str, pair: Found, alone: Found) -> None:
    """Peers: before training for the two policies' own rewards, the solver alone for the trajectory's."""
    assert pair.first is not None
    assert pair.verifier is not None
    same = f"{pair.samples} and {alone.samples} solver samples"
    report.add(
        f"{seed}: trajectory, pair", pair.trajectory[1], pair.trajectory[0], unit="reward (peer: before)", goal=1.0
    )
    report.add(f"{seed}: verifier, pair", pair.verifier[1], pair.verifier[0], unit="reward (peer: before)", goal=1.0)
    report.add(f"{seed}: solver's first answer, pair", pair.first[1], alone.trajectory[1], unit="reward (peer: alone)")
    report.add(
        f"{seed}: trajectory, pair; {same}", pair.trajectory[1], alone.trajectory[1], unit="reward (peer: alone)"
    )


def mean_of(runs: Sequence[Found]) -> Found:
    def mean(name: str) -> tuple[float, float]:
        pairs = [getattr(run, name) for run in runs]
        return statistics.fmean(p[0] for p in pairs), statistics.fmean(p[1] for p in pairs)

    first = mean("first") if runs[0].first else None
    verifier = mean("verifier") if runs[0].verifier else None
    samples = round(statistics.fmean(run.samples for run in runs))
    return Found(mean("trajectory"), first, verifier, samples, statistics.fmean(run.seconds for run in runs))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", help="one run of each kind for every seed")
    arguments.add_argument("--steps", type=int, help="optimizer steps of each policy of a pair")
    arguments.add_argument("--turn", type=int, default=8, help="steps of one policy before it is the other's turn")
    arguments.add_argument("--keep", metavar="FOLDER", help="where runs stay; those that are there are not made again")
    given = arguments.parse_args()
    seeds, steps = ([7], 12) if given.quick else ([7, 11, 3], 32)
    seeds, steps = given.seeds or seeds, given.steps or steps
    report = Report("solver_verifier")
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(Path(given.keep or temporary), steps, given.turn)
        pairs: list[Found] = []
        alone: list[Found] = []
        turns: list[float] = []
        for seed in seeds:
            pairs.append(runs.pair(seed))
            alone.append(runs.alone(seed, pairs[-1].samples))
            turns.append(runs.turns(seed))
            report_rewards(report, f"seed {seed}", pairs[-1], alone[-1])
            print(f"seed {seed}: {pairs[-1]}, alone {alone[-1]}, turns {turns[-1]:.1f} s", file=sys.stderr)
    if len(seeds) > 1:
        report_rewards(report, f"mean of {len(seeds)} seeds", mean_of(pairs), mean_of(alone))
    label = f"{steps} steps of both policies at once (peer: in turns of {given.turn})"
    ours, peer = (statistics.median(taken) for taken in ([run.seconds for run in pairs], turns))
    report.add(label, ours, peer, unit="s", less_is_better=True, goal=1.0)
    report.finish(given.json)


if __name__ == "__main__":
    main()
