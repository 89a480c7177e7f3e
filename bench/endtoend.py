"""A whole training run beside TRL's GRPOTrainer, on this machine's CPU, on the same task.

Same weights to begin with, prompts in the same order, reward, groups of 8, 128 samples a step, token limits, AdamW,
loss (GRPO, no KL) in fp32, each side with the settings that were found fastest for it. Three cases:

- equal: every answer has 32 tokens
- tails: a prompt's answers have as many tokens as a log-normal draw says (median 20, mean 33, at most 256)
- tools: the stockroom; ask a tool, read what it says, answer

    python -m bench.endtoend --case tails --seeds 3 --keep FOLDER --json -

What is measured: samples/s between the end of the second step and of the last; wall time to all samples from the first
work and from the start of the command; the reward after equal samples, of the trained weights on held-out prompts; time
to the same reward. Ours is asynchronous: how stale its samples were stands beside. With `--keep`, what FOLDER has
already is not measured again, so that the seeds can be run one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench import endtoend_task as task
from bench.common import Report, parser
from bench.endtoend_cpu import Metered
from bench.endtoend_heldout import heldout_reward
from rillflow.examples import stockroom
from rillflow.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
BATCH = 128
FROM = 2  # steps before those whose rate is taken
LAST = 5  # steps over which the reward at the end is averaged
LIMIT = 600.0  # seconds that one side may take


class Case(msgspec.Struct, frozen=True):
    """The work of a case for both sides, and the best settings of each."""

    steps: int
    tokens: int  # the longest completion
    lr: float
    eps: float
    goal: float | None
    trl: dict[str, Any]  # rows of a micro-batch, threads
    ours: dict[str, Any]  # episodes at once, context, staleness


CASES = {
    "equal": Case(
        steps=40,
        tokens=task.EQUAL,
        lr=1e-3,
        eps=1e-8,
        goal=2.0,
        trl={"rows": 128, "threads": 2},
        ours={"nodes": 1, "episodes": 128, "context": 96, "staleness": 1},
    ),
    # The longest answers take as long as some steps: a bound of one version would drop what is long.
    "tails": Case(
        steps=40,
        tokens=task.LONGEST,
        lr=1e-3,
        eps=1e-8,
        goal=3.0,
        trl={"rows": 128, "threads": 2},
        ours={"nodes": 1, "episodes": 128, "context": 320, "staleness": 4},
    ),
    # Agents, tools and calls take five times what the trainer takes: two nodes, of half as many episodes each.
    "tools": Case(
        steps=16,
        tokens=64,
        lr=5e-4,
        eps=1e-5,
        goal=None,
        trl={"rows": 128, "threads": 2},
        ours={"nodes": 2, "episodes": 64, "context": 160, "staleness": 1},
    ),
}


class Side(msgspec.Struct, frozen=True):
    """One run: when its command was given, when its first work began, and of each step when it ended, the mean reward
    of its samples, the mean length of their answers and how many versions old they were."""

    started: float
    begun: float
    ended: list[float]
    reward: list[float]
    length: list[float]
    cores: dict[str, float]  # core seconds of a sample, by role, between the steps whose rate is taken
    heldout: float = 0.0  # reward of the trained weights on held-out prompts
    stale: list[float] = []

    def rate(self) -> float:
        return (len(self.ended) - FROM) * BATCH / (self.ended[-1] - self.ended[FROM - 1])

    def seconds_to(self, reward: float) -> float | None:
        """Return the seconds until the end of the first step at which the reward, averaged over LAST steps, is
        reached."""
        for step in range(LAST, len(self.reward) + 1):
            if statistics.mean(self.reward[step - LAST : step]) >= reward:
                return self.ended[step - 1] - self.begun
        return None


# ---------------------------------------------------------------- the two sides


def recipe(case: str, job: Case, model: str, prompts: Path, seed: int) -> dict[str, Any]:
    best, tools = job.ours, case == "tools"
    played = stockroom.__name__ if tools else task.__file__
    return {
        "name": f"endtoend-{case}",
        "seed": seed,
        "policies": {
            "agent": {
                "model": model,
                "sampling": {"temperature": 1.0, "max_tokens": 32},
                "engine": {"slots": 128, "context": best["context"], "on_update": "keep"},
            }
        },
        "workflow": f"{played}:play",
        "reward": f"{played}:reward",
        "data": {"prompts": {"path": str(prompts)}, "shuffle": False},
        "dataflow": {"group_size": task.GROUP, "staleness": best["staleness"], "filters": []},
        "trainer": {
            "algorithm": "grpo",
            "convention": "trl",
            "steps": job.steps,
            "batch_groups": BATCH // task.GROUP,
            "lr": job.lr,
            "eps": job.eps,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "checkpoint_every": job.steps,
            "trees": True,
            "micro_tokens": 3072,
            "stream_groups": 4,
        },
        "rollout": {"nodes": best["nodes"], "episodes": best["episodes"], "refresh_every": 0.05},
        "observe": {"trackers": {"tensorboard": False}, "plot": False},
        "runtime": {"threads": 1},
    }


def ours(case: str, job: Case, model: str, folder: Path, seed: int) -> Side:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(case, job, model, folder / "prompts.jsonl", seed)))
    command = [sys.executable, "-m", "rillflow", "run", str(file), "--runs", str(folder / "runs")]
    started = time.time()
    cold = {**os.environ, "RILLFLOW_WARM": ""}  # no process that has imported torch before
    with Metered(command, stdout=sys.stderr, env=cold) as meter:
        code = meter.wait(LIMIT)
    (run,) = (folder / "runs").iterdir()
    if code:
        for log in sorted(run.glob("logs/*")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
        raise RuntimeError(f"our run ended with {code}")
    subprocess.run([sys.executable, "-m", "rillflow", "export", str(run), str(folder / "ours")], check=True)
    steps = read_metrics(run / "metrics.jsonl", "agent").of("agent")
    ended = [step["time"] for step in steps]
    return Side(
        started=started,
        begun=_first_work(run / "logs" / "rollout-0.log"),
        ended=ended,
        cores=_cores(meter, ended),
        heldout=heldout_reward(case, str(folder / "ours"), seed),
        reward=[step["reward_mean"] for step in steps],
        length=[step["response_length"] for step in steps],
        stale=[step["staleness_mean"] for step in steps],
    )


def _first_work(log: Path) -> float:
    """When the node could take its first task: the model is loaded and the gateway listens."""
    found = re.search(r"^(\S+ \S+) INFO \S+: node \S+: gateway at", log.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{log} does not say when the node was ready")
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def trl(python: str, told: dict[str, Any], folder: Path) -> Side:
    (folder / "job.json").write_text(json.dumps(told))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, "-m", "bench.endtoend_trl", str(folder)]
    started = time.time()
    with Metered(command, stdout=sys.stderr, env=environment, cwd=ROOT) as meter:
        code = meter.wait(LIMIT)
    if code:
        raise RuntimeError(f"TRL's run ended with {code}")
    found = json.loads((folder / "trl.json").read_text())
    cores, heldout = _cores(meter, found["ended"]), heldout_reward(told["case"], str(folder / "theirs"), told["seed"])
    return msgspec.convert({"started": started, "cores": cores, "heldout": heldout, **found}, Side)


def _cores(meter: Metered, ended: list[float]) -> dict[str, float]:
    taken = meter.between(ended[FROM - 1], ended[-1])
    return {role: seconds / BATCH / (len(ended) - FROM) for role, seconds in taken.items()}


def prepare(case: str, job: Case, seed: int, folder: Path) -> str:
    """Write the prompts of a seed, and return the model that a run of it starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    count = job.steps * BATCH // task.GROUP
    tools = case == "tools"
    # Ours asks for prompts ahead of the step that they are for; those of the last steps are never trained.
    ahead = count + 16 * BATCH // task.GROUP
    rows = stockroom.prompts("train", ahead, seed) if tools else task.prompts(case, ahead, seed)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": row["id"], **row["payload"]}) + "\n" for row in rows)
    )
    return str(ROOT / "src/rillflow/assets/tiny") if tools else str(task.make_model(folder / "model", seed))


def measure(case: str, job: Case, seed: int, folder: Path, python: str) -> tuple[Side, Side]:
    """Both sides of one seed, one after the other, each from the same weights and prompts."""
    model = prepare(case, job, seed, folder)
    told = msgspec.to_builtins(job) | {"case": case, "model": model, "batch": BATCH, "seed": seed}
    sides: dict[str, Callable[[], Side]] = {
        "ours": lambda: ours(case, job, model, folder, seed),
        "trl": lambda: trl(python, told, folder),
    }
    for name, run in sides.items():
        kept = folder / f"{name}.side.json"
        if not kept.is_file():
            kept.write_bytes(msgspec.json.encode(run()))
    mine, peer = (msgspec.json.decode((folder / f"{name}.side.json").read_bytes(), type=Side) for name in sides)
    return mine, peer


# ---------------------------------------------------------------- what is told


def tell(report: Report, case: str, goal: float | None, pairs: list[tuple[Side, Side]]) -> None:
    """Medians over the seeds. Rewards are judged together: ours is not below TRL's where the mean of the seeds'
    differences is not below 0 by more than twice its standard error."""

    def both(
        name: str, of: Callable[[Side], float], unit: str, goal: float | None = None, *, less: bool = False
    ) -> None:
        mine, peer = (statistics.median(of(pair[place]) for pair in pairs) for place in (0, 1))
        report.add(f"{case}: {name}", mine, peer, unit=unit, goal=goal, less_is_better=less)

    both("samples/s", Side.rate, "samples/s", goal)
    # A side that serves ready samples first trains on short answers first: samples alone would not be the same work.
    both("answer tokens/s", lambda s: s.rate() * statistics.mean(s.length[FROM:]), "tokens/s")
    samples = len(pairs[0][0].ended) * BATCH
    both(f"{samples} samples from the first work", lambda s: s.ended[-1] - s.begun, "s", goal, less=True)
    both(f"{samples} samples from the command", lambda s: s.ended[-1] - s.started, "s", less=True)
    both("core milliseconds a sample", lambda s: 1000 * sum(s.cores.values()), "ms", less=True)
    both("tokens of an answer", lambda s: statistics.mean(s.length), "tokens")
    both(f"reward, first {LAST} steps", lambda s: statistics.mean(s.reward[:LAST]), "reward")
    both(f"reward, last {LAST} steps", lambda s: statistics.mean(s.reward[-LAST:]), "reward")
    both("reward, all steps", lambda s: statistics.mean(s.reward), "reward")
    both("reward of the trained weights, held-out prompts", lambda s: s.heldout, "reward")
    _tell_rewards(report, case, pairs)
    _tell_time_to_reward(report, case, pairs)
    for role in pairs[0][0].cores:
        taken = statistics.median(1000 * mine.cores.get(role, 0.0) for mine, _ in pairs)
        report.add(f"{case}: core milliseconds a sample, {role}", taken, None, unit="ms", reason="ours alone")
    stale = statistics.mean(step for mine, _ in pairs for step in mine.stale)
    report.add(f"{case}: staleness of a sample, mean", stale, None, unit="versions", reason="TRL is on-policy")


def _tell_rewards(report: Report, case: str, pairs: list[tuple[Side, Side]]) -> None:
    """Ours less TRL's: of the weights after equal samples, which is what counts, and of the samples on the way, which
    lag behind the weights by their staleness."""
    of: dict[str, Callable[[Side], float]] = {
        "of the weights after equal samples": lambda side: side.heldout,
        "of the samples on the way": lambda side: statistics.mean(side.reward),
    }
    for name, value in of.items():
        apart = [value(mine) - value(peer) for mine, peer in pairs]
        noise = statistics.stdev(apart) / len(apart) ** 0.5 if apart[1:] else float("nan")
        told = f"standard error {noise:.4f} over {len(apart)} seeds; not below: at least -2 of it"
        report.add(f"{case}: reward {name}, ours less TRL's", statistics.mean(apart), None, unit="reward", reason=told)
        if apart[1:]:
            report.results[-1]["met"] = statistics.mean(apart) >= -2 * noise


def _tell_time_to_reward(report: Report, case: str, pairs: list[tuple[Side, Side]]) -> None:
    """The reward that both sides reach within each pair: the lower of their ends."""
    mine, peer = [], []
    for pair in pairs:
        level = min(max(_smooth(side.reward)) for side in pair)
        taken = [side.seconds_to(level) for side in pair]
        if None not in taken:
            mine.append(taken[0])
            peer.append(taken[1])
    if mine:
        name = f"{case}: time to the highest reward that both reach"
        report.add(name, statistics.median(mine), statistics.median(peer), unit="s", less_is_better=True)


def _smooth(reward: list[float]) -> list[float]:
    return [statistics.mean(reward[step - LAST : step]) for step in range(LAST, len(reward) + 1)]


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--case", choices=tuple(CASES), action="append", help="default: all three")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--first", type=int, default=1, help="the first seed")
    made.add_argument("--python", default=str(ROOT / ".venv-oracle/bin/python"), help="that has TRL")
    made.add_argument("--keep", type=Path, help="keep what is measured in this folder, and use what is there")
    return made.parse_args()


def main() -> None:
    arguments = read_arguments()
    report = Report("endtoend")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.case or CASES:
            job = CASES[name]
            if arguments.quick:
                job = msgspec.structs.replace(job, steps=8)
            seeds = range(arguments.first, arguments.first + (1 if arguments.quick else arguments.seeds))
            folder = arguments.keep or Path(temporary)
            pairs = [measure(name, job, seed, folder / f"{name}-{seed}", arguments.python) for seed in seeds]
            tell(report, name, job.goal, pairs)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
