"""Two policies without a barrier against the synchronous loop of one controller, with real trainers and long tails.

    python -m bench.multipolicy [--seeds 3] [--steps 24] [--keep FOLDER] [--quick] [--json FILE]

Real runs of `recipes/two_policies.yaml` from the shipped tiny policy: a solver answers with a tool, a checker judges
the answer. Both sides play the same prompts, 64 episodes at a time, and make as many optimizer steps of each policy on
as many samples:

no barrier    each policy has a trainer at its own pace; nodes never wait; samples may be 4 versions old
synchronous   64 episodes are played, then both policies are updated, then both are published, and nodes go on with the
              new weights (`dataflow.staleness: 0`, and a barrier across the policies in the step graph)

Sampling, gradients, weights and the dataflow layer are real. Two things are emulated, because this machine has neither
tools nor devices; both are sleeps, which take no processor time from the other side's work:

- A call of the tool takes a log-normal time (`bench.multipolicy_work.workflow.latency`): a median of 1 s, 12 s at most.
- A step takes the time of a device (`bench.staleness_work.pace`), beside the real computing. There are 4 devices. With
  no barrier two of them sample, the third trains the solver (3 s a step) and the fourth the checker (0.75 s). In the
  synchronous loop all four sample, then all four train one policy after the other, each step in a quarter of its time:
  no loss by sharding, and none by switching between sampling and training. Sampling is the real engine's on both sides.

The rate is that of both policies' samples from the moment when both have made 2 steps to the last commit of either. A
fast policy makes its steps earlier and is then done; the slower one ends the run. `waited` is the mean time that the
trained episodes have waited for the tool: a side that trains on quick episodes only would show it. The two trainers of
the synchronous side commit one after the other; episodes that begin between the two are played `again`. One controller
would not do that, so the seconds that they cost (`lost`) are taken off that side's times.

The checker cannot know the count that it judges. It learns the verdict that fits more often, which is `no` at first,
and keeps it when most answers have become right: only the solver's reward tells how well a side learns.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.arms import Mean, Runs, asked, episodes, held_out, table
from bench.common import Report, parser
from bench.multipolicy_work.workflow import latency
from rillflow.dataflow.audit import audit
from rillflow.observe.metrics import read_metrics

GOAL = 2.7
OURS, PEER = "no barrier", "synchronous"
POLICIES = ("solver", "checker")
DEVICE_SECONDS = {"solver": 3.0, "checker": 0.75}  # of a step on one device
DEVICES = 4
STALENESS = 4
FROM = 2  # steps of each policy before those whose rate is taken
LAST = 5  # steps over which the reward at the end is averaged
_HERE = Path(__file__).parent
_WORK = _HERE / "multipolicy_work"
_FIRST = "SELECT min(admitted_at) FROM groups WHERE lane = 'train'"
_AGAIN = "SELECT count(*) FROM ended_attempts WHERE state = 'returned' AND cause = 'stale'"
# For each step with repeated episodes: the begin of its first episode, the end of its last one, the longest duration.
_SAMPLING = (
    "SELECT s.trained_into, min(a.leased_at), max(CASE a.state WHEN 'done' THEN a.ended_at END), "
    "max(CASE a.state WHEN 'done' THEN a.ended_at - a.leased_at END) "
    "FROM shares s JOIN attempts a ON a.grp = s.grp WHERE s.stream = ? AND s.state = 'trained' "
    "GROUP BY s.trained_into HAVING sum(a.cause = 'stale') > 0 ORDER BY s.trained_into"
)
_DROPPED = "SELECT total(n) FROM share_tally WHERE state = 'expired' AND cause IN ('stale', 'surplus')"
_TRAINED = (
    "SELECT t.seed FROM shares s JOIN tasks t ON t.grp = s.grp "
    "WHERE s.stream = ? AND s.state = 'trained' AND t.state = 'done'"
)


@dataclass(frozen=True)
class Steps:
    """The steps of one policy: when each was committed, how many samples it had and their mean reward."""

    ended: list[float]
    samples: list[int]
    rewards: list[float]
    staleness_mean: float
    staleness_max: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a step after the warm-up."""
        return (self.ended[-1] - self.ended[FROM - 1]) / (len(self.ended) - FROM)

    @property
    def reward(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def smooth(self) -> list[float]:
        """Return the mean reward of each LAST steps in a row."""
        return [statistics.fmean(self.rewards[end - LAST : end]) for end in range(LAST, len(self.rewards) + 1)]

    def reached(self, level: float) -> float:
        """Return when the mean reward of LAST steps was at least `level` for the first time."""
        return next(ended for ended, reward in zip(self.ended[LAST - 1 :], self.smooth, strict=True) if reward >= level)


@dataclass(frozen=True)
class Outcome:
    """One run. `begun` is when the first prompt was admitted; `played` counts episodes, `again` those that were played
    a second time because weights changed, `lost` the seconds that it cost, `dropped` the groups that one policy's
    trainer did not get because they were too old or too many for it."""

    seed: int
    begun: float
    policies: dict[str, Steps]
    after: Mean
    played: int
    again: int
    lost: float
    dropped: int
    waited: float

    @property
    def seconds(self) -> float:
        """Return the seconds from the first prompt to the last commit."""
        return max(steps.ended[-1] for steps in self.policies.values()) - self.begun

    @property
    def rate(self) -> float:
        """Return the trained samples of all policies a second, after the warm-up."""
        begin = max(steps.ended[FROM - 1] for steps in self.policies.values())
        end = max(steps.ended[-1] for steps in self.policies.values())
        later = [
            samples
            for steps in self.policies.values()
            for ended, samples in zip(steps.ended, steps.samples, strict=True)
            if ended > begin
        ]
        return sum(later) / (end - begin)


class Bench:
    def __init__(self, runs: Runs, *, steps: int) -> None:
        self._runs = runs
        self._steps = steps

    def outcome(self, side: str, seed: int) -> Outcome:
        meeting = self._runs.folder / f"meeting-{seed}"
        shutil.rmtree(meeting, ignore_errors=True)
        meeting.mkdir()
        run = self._runs.made(f"{side.replace(' ', '-')}-{seed}", *self.command(side, seed, meeting))
        if not audit(run / "ledger.sqlite").balanced:
            raise RuntimeError(f"the audit of {run} does not balance")
        return read(run, seed, side)

    def command(self, side: str, seed: int, meeting: Path) -> list[str]:
        given = [f"seed={seed}", f"workflow={_WORK / 'workflow.py'}:play", f"trainer.steps={self._steps}",
                 f"trainer.checkpoint_every={self._steps}", "trainer.stream_groups=0", "dataflow.filters=[]",
                 "rollout.refresh_every=0.05", "runtime.threads=1", "evaluation.every=0", "evaluation.repeats=2",
                 "observe.plot=false"]  # fmt: skip
        alone = [f"policies.{name}.trainer.nodes=[{_pace(DEVICE_SECONDS[name])}]" for name in POLICIES]
        if side == OURS:
            return ["run", "two_policies", *given, f"dataflow.staleness={STALENESS}", *alone]
        shared = _pace(sum(DEVICE_SECONDS.values()) / DEVICES)
        together = [
            f"policies.{name}.trainer.graph=[fetch, advantages, {shared}, train_actor, {_barrier(name, meeting)}]"
            for name in POLICIES
        ]
        return ["run", "two_policies", *given, "dataflow.staleness=0", "trainer.publish_delay=0", *together]


def _pace(seconds: float) -> str:
    return f'{{function: "{_HERE / "staleness_work.py"}:pace", options: {{seconds: {seconds}}}}}'


def _barrier(policy: str, meeting: Path) -> str:
    options = f'{{folder: "{meeting}", policy: {policy}, policies: [{", ".join(POLICIES)}]}}'
    return f'{{function: "{_WORK / "barrier.py"}:publish_together", options: {options}}}'


def read(run: Path, seed: int, side: str) -> Outcome:
    """Return the outcome of a finished run. The times of the synchronous side are without the seconds that repeated
    episodes cost."""
    metrics = read_metrics(run / "metrics.jsonl", POLICIES[0])
    ((first,),) = asked(run, _FIRST)
    ((again,),) = asked(run, _AGAIN)
    ((dropped,),) = asked(run, _DROPPED)
    trained = asked(run, _TRAINED, POLICIES[0])
    lost = {int(step): end - begin - longest for step, begin, end, longest in asked(run, _SAMPLING, POLICIES[0])}
    lost = lost if side == PEER else {}
    return Outcome(
        seed,
        first,
        {name: _steps(metrics.of(name), lost) for name in POLICIES},
        held_out(run)[1],
        episodes(run),
        int(again),
        sum(lost.values()),
        int(dropped),
        statistics.fmean(latency(int(drawn)) for (drawn,) in trained),
    )


def _steps(rows: Sequence[Mapping[str, Any]], lost: Mapping[int, float]) -> Steps:
    return Steps(
        [row["time"] - sum(lost.get(step, 0.0) for step in range(1, row["step"] + 1)) for row in rows],
        [int(row["samples"]) for row in rows],
        [row["reward"] for row in rows],
        statistics.fmean(row["staleness_mean"] for row in rows),
        max(row["staleness_max"] for row in rows),
    )


def report(ours: Sequence[Outcome], peer: Sequence[Outcome], destination: str | None) -> None:
    """Write the medians over the seeds, and the rewards as means."""
    made = Report("multipolicy")
    made.add("trained samples of both policies", *_medians(ours, peer, "rate"), unit="1/s", goal=GOAL)
    steps = len(ours[0].policies[POLICIES[0]].ended)
    name = f"from the first prompt to {steps} steps of both policies"
    made.add(name, *_medians(ours, peer, "seconds"), unit="s", less_is_better=True)
    for policy in POLICIES:
        mine, theirs = ([one.policies[policy] for one in side] for side in (ours, peer))
        made.add(f"step of the {policy}", *_medians(mine, theirs, "seconds"), unit="s", less_is_better=True)
        made.add(f"training reward of the {policy}, last {LAST} steps", *_means(mine, theirs, "reward"), unit="reward")
    made.add(
        f"to the highest training reward of the {POLICIES[0]} that both sides reach (mean of {LAST} steps)",
        *_times_to_reward(ours, peer), unit="s", less_is_better=True,
    )  # fmt: skip
    after = [statistics.fmean(one.after.value for one in side) for side in (ours, peer)]
    made.add("held-out reward of the solver after training", after[0], after[1] or None, unit="reward")
    made.finish(
        destination,
        settings={"device_seconds": DEVICE_SECONDS, "devices": DEVICES, "staleness": STALENESS, "steps": steps},
        runs={OURS: [_plain(one) for one in ours], PEER: [_plain(one) for one in peer]},
    )
    print(table(HEAD, [row(name, one) for name, side in ((OURS, ours), (PEER, peer)) for one in side]))


def _medians(ours: Sequence[Any], peer: Sequence[Any], part: str) -> tuple[float, float]:
    mine, theirs = (statistics.median(getattr(one, part) for one in side) for side in (ours, peer))
    return mine, theirs


def _means(ours: Sequence[Any], peer: Sequence[Any], part: str) -> tuple[float, float | None]:
    mine, theirs = (statistics.fmean(getattr(one, part) for one in side) for side in (ours, peer))
    return mine, theirs or None


def _times_to_reward(ours: Sequence[Outcome], peer: Sequence[Outcome]) -> tuple[float, float]:
    """Return the medians over the seeds of the seconds from the first prompt to a reward that both sides reach."""
    taken: list[list[float]] = []
    for pair in zip(ours, peer, strict=True):
        level = min(max(one.policies[POLICIES[0]].smooth) for one in pair)
        taken.append([one.policies[POLICIES[0]].reached(level) - one.begun for one in pair])
    mine, theirs = (statistics.median(side) for side in zip(*taken, strict=True))
    return mine, theirs


HEAD = ["side", "seed", "samples/s", "seconds", *(f"{name}: step s, reward, staleness" for name in POLICIES),
        "held-out", "episodes played", "again (s lost)", "groups dropped", "waited s"]  # fmt: skip


def row(side: str, one: Outcome) -> list[str]:
    """Return a run as the cells of a table."""
    each = [
        f"{of.seconds:.2f}, {of.reward:.2f}, {of.staleness_mean:.1f} (most {of.staleness_max:.0f})"
        for of in one.policies.values()
    ]
    return [side, str(one.seed), f"**{one.rate:.1f}**", f"{one.seconds:.0f}", *each, f"{one.after.value:.2f}",
            f"{one.played:,}", f"{one.again} ({one.lost:.0f})", str(one.dropped), f"{one.waited:.2f}"]  # fmt: skip


def _plain(one: Outcome) -> dict[str, Any]:
    policies = {
        name: asdict(of) | {"ended": [ended - one.begun for ended in of.ended], "seconds": of.seconds}
        for name, of in one.policies.items()
    }
    whole = asdict(one) | {"policies": policies, "rate": one.rate, "seconds": one.seconds}
    return whole | {"after": [one.after.value, one.after.error]}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, help="how many seeds; default 3, with --quick 1")
    arguments.add_argument("--steps", type=int, help="optimizer steps of each policy; default 24, with --quick 6")
    arguments.add_argument("--keep", type=Path, help="folder in which the runs stay; finished ones are not made again")
    given = arguments.parse_args()
    seeds = range(given.seeds or (1 if given.quick else 3))
    steps = given.steps or (6 if given.quick else 24)
    if steps < LAST:
        arguments.error(f"--steps must be at least {LAST}: rewards are means of as many steps")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(Runs(folder, 1), steps=steps)
        found: dict[str, list[Outcome]] = {OURS: [], PEER: []}
        for seed in seeds:
            for side, outcomes in found.items():
                outcomes.append(bench.outcome(side, seed))
    report(found[OURS], found[PEER], given.json)


if __name__ == "__main__":
    main()
