"""A solver and a verifier that learn at once, against the solver alone on as many samples.

    python -m bench.solver_verifier [--seeds N …] [--steps N] [--jobs 1] [--keep FOLDER] [--quick] [--seconds N]
                                    [--json FILE]

Real runs of `recipes/solver_verifier.yaml` on the pairs, which are easier to check than to solve, from one supervised
warm start of both policies, for each seed:

pair            both policies train at once; a rejected solver tries again
always approve  the first answers of the pair's solver: what it would be without its verifier
solver alone    `recipes/pairs.yaml` until its solver has trained on as many samples as the pair's
best of 3       the same number of samples, three answers to each question, of which the most frequent is taken

Rewards are those of held-out prompts, four episodes of each, with intervals over prompts. With --keep, runs that are
there already are not made again; with --seconds those that are finished in time are reported.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import Mean, NotMade, Runs, asked, at_once, held_out, table
from bench.common import Report, parser
from rillflow.dataflow.audit import audit

POLICIES = ("solver", "verifier")
PAIR, APPROVE, ALONE, BEST = "pair", "always approve", "solver alone", "best of 3"
REPEATS, ANSWERS = 4, 3
_ROUNDS = "SELECT id FROM rounds WHERE state = 'ended' ORDER BY id"
_SAMPLES = "SELECT sum(samples) FROM steps WHERE policy = 'solver' AND state = 'live'"
# Of an evaluation: for each episode the reward of the first answer and that of the verdict.
_VERDICTS = (
    "SELECT g.prompt, s.reward, v.reward, t.reward FROM tasks t JOIN groups g ON g.id = t.grp "
    "JOIN samples s ON s.grp = t.grp AND s.place = t.place AND s.agent = 'solver' AND s.turn = 0 "
    "JOIN samples v ON v.grp = t.grp AND v.place = t.place AND v.agent = 'verifier' "
    "WHERE g.lane = 'eval' AND g.round = ? AND t.state = 'done'"
)


@dataclass(frozen=True)
class Found:
    """What an arm came to, before and after; `samples` of the solver were trained."""

    before: Mean
    after: Mean
    samples: int


@dataclass(frozen=True)
class Verdicts:
    """How often a verifier's verdict fits right first answers, and wrong ones."""

    right: float
    wrong: float

    @property
    def balanced(self) -> float:
        return (self.right + self.wrong) / 2


class Bench:
    def __init__(self, runs: Runs, *, steps: int, warm: Path | None, threads: int, few: bool) -> None:
        self._runs = runs
        self._steps = steps
        self._given = warm
        self._threads = threads
        self._few = few

    def warm(self) -> Path:
        """The model that all begin with."""
        if self._given is not None:
            return self._given
        quick = ["trainer.steps=8", "trainer.batch_groups=64", "data.train.arguments.count=512"] if self._few else []
        return self._runs.made("pairs-warm", "fit", "pairs_warm", f"runtime.threads={self._threads}", *quick) / "model"

    def pair(self, seed: int) -> Found:
        return self._found(self._pair(seed))

    def first_answers(self, seed: int) -> Found:
        """The pair's evaluations, had every verdict been an approval."""
        run = self._pair(seed)
        before, after = (Mean.of(_by_prompt(rows)) for rows in _evaluations(run))
        return Found(before, after, _samples(run))

    def verdicts(self, seed: int) -> tuple[Verdicts, Verdicts]:
        """Return the verdicts before and after training."""
        before, after = (_verdicts(rows) for rows in _evaluations(self._pair(seed)))
        return before, after

    def alone(self, seed: int) -> Found:
        """A batch has 64 samples: group_size times batch_groups."""
        return self._equal(ALONE, seed, 64)

    def best_of(self, seed: int) -> Found:
        check = "rillflow.examples.pairs:reward"
        options = f'options={{answers: {ANSWERS}, check: "{check}", prompts: {{solve: "{{question}}"}}}}'
        workflow = ["workflow=rillflow.agents.workflows.question:play_best_of", "reward=null", options]
        groups = ["dataflow.group_size=8", "dataflow.grouping=turn"]
        return self._equal(BEST, seed, 8 * 8 * ANSWERS, *workflow, *groups)

    def _equal(self, name: str, seed: int, batch: int, *more: str) -> Found:
        steps = math.ceil(_samples(self._pair(seed)) / batch)
        return self._found(self._run(name, "pairs", seed, steps, POLICIES[:1], *more))

    def _pair(self, seed: int) -> Path:
        # After a short warm start no answer is right, and balanced verdicts would never come.
        few = ["options.balance=false"] if self._few else []
        return self._run(PAIR, "solver_verifier", seed, self._steps, POLICIES, *few)

    def _found(self, run: Path) -> Found:
        return Found(*held_out(run), _samples(run))

    def _run(self, name: str, recipe: str, seed: int, steps: int, policies: tuple[str, ...], *more: str) -> Path:
        few = ["data.heldout.arguments.count=16", "dataflow.filters=[]"] if self._few else []
        given = [f"seed={seed}", f"trainer.steps={steps}", f"trainer.checkpoint_every={steps}", "evaluation.every=0",
                 f"evaluation.repeats={REPEATS}", "observe.plot=false"]  # fmt: skip
        models = [f"policies.{policy}.model={self.warm()}" for policy in policies]
        part = f"{name.replace(' ', '-')}-{seed}"
        run = self._runs.made(part, "run", recipe, *given, *models, *more, *few)
        if not audit(run / "ledger.sqlite").balanced:
            raise RuntimeError(f"the audit of {run} does not balance")
        return run


def _samples(run: Path) -> int:
    ((count,),) = asked(run, _SAMPLES)
    return int(count)


def _evaluations(run: Path) -> list[list[tuple[Any, ...]]]:
    """The episodes of the evaluations before and after training."""
    rounds = [number for (number,) in asked(run, _ROUNDS)]
    return [asked(run, _VERDICTS, number) for number in (rounds[0], rounds[-1])]


def _verdicts(rows: list[tuple[Any, ...]]) -> Verdicts:
    kinds = [[judged for _, worth, judged, _ in rows if (worth > 0.5) == right] for right in (True, False)]
    right, wrong = (statistics.fmean(kind) if kind else math.nan for kind in kinds)
    return Verdicts(right, wrong)


def _by_prompt(rows: list[tuple[Any, ...]]) -> list[float]:
    found: dict[str, list[float]] = {}
    for prompt, worth, *_ in rows:
        found.setdefault(prompt, []).append(worth)
    return [statistics.fmean(values) for values in found.values()]


def report(found: dict[str, list[Found]], verdicts: list[tuple[Verdicts, Verdicts]], destination: str | None) -> None:
    made = Report("solver_verifier")
    after = {name: statistics.fmean(one.after.value for one in ones) for name, ones in found.items()}
    before = statistics.fmean(one.before.value for one in found[PAIR])
    made.add("trajectory, mean of seeds: pair (peer: before)", after[PAIR], before or None, unit="reward", goal=1.0)
    for name in (name for name in found if name != PAIR):
        made.add(
            f"trajectory, mean of seeds: pair (peer: {name})", after[PAIR], after[name] or None, unit="reward", goal=1.0
        )
    arms = {
        name: [{"before": [one.before.value, one.before.error], "after": [one.after.value, one.after.error],
                "solver_samples": one.samples} for one in ones]
        for name, ones in found.items()
    }  # fmt: skip
    kinds = [
        {"before": [first.right, first.wrong], "after": [last.right, last.wrong], "balanced": last.balanced}
        for first, last in verdicts
    ]
    made.finish(destination, arms=arms, verdicts=kinds)
    rows = []
    for name, ones in found.items():
        single = ", ".join(f"{one.after.value:.2f} ± {one.after.error:.2f}" for one in ones)
        start = statistics.fmean(one.before.value for one in ones)
        samples = statistics.fmean(one.samples for one in ones)
        rows.append([name, f"{start:.2f}", f"**{after[name]:.2f}** ({single})", f"{samples:.0f}"])
    print(table(["arm", "before", "after (each seed)", "solver samples"], rows))
    for name, ones in zip(("before", "after"), zip(*verdicts, strict=True), strict=True):
        each = ", ".join(f"{one.right:.2f} and {one.wrong:.2f}" for one in ones)
        print(f"verdicts that fit, of right and of wrong first answers, {name}: {each}")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", help="one run of each kind for every seed")
    arguments.add_argument("--steps", type=int, help="optimizer steps of each policy of a pair")
    arguments.add_argument("--jobs", type=int, default=1, help="commands at once")
    arguments.add_argument("--threads", type=int, default=1, help="torch threads of the warm start")
    arguments.add_argument("--warm", type=Path, help="model folder of a warm start that was made before")
    arguments.add_argument("--keep", type=Path, help="where runs stay; those that are there are not made again")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="stop then and report what is finished")
    given = arguments.parse_args()
    seeds, steps = ([7], 2) if given.quick else ([7, 11, 3], 32)
    seeds, steps = given.seeds or seeds, given.steps or steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        warm = given.warm and given.warm.resolve()
        runs = Runs(folder, given.jobs, given.seconds)
        bench = Bench(runs, steps=steps, warm=warm, threads=given.threads, few=given.quick)
        kinds = {PAIR: bench.pair, APPROVE: bench.first_answers, ALONE: bench.alone, BEST: bench.best_of}
        done = at_once([partial(kind, seed) for kind in kinds.values() for seed in seeds])
        found: dict[str, list[Found]] = {}
        for place, one in enumerate(done):
            if one is not None:
                found.setdefault(list(kinds)[place // len(seeds)], []).append(one)
        if PAIR not in found:
            raise NotMade("not even a pair is finished")
        verdicts = at_once([partial(bench.verdicts, seed) for seed in seeds])
        report(found, [one for one in verdicts if one is not None], given.json)


if __name__ == "__main__":
    main()
