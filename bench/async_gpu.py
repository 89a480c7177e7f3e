"""A whole asynchronous run on one GPU, beside TRL's GRPOTrainer with vLLM in its process, on the same task.

One-digit addition, groups of 8, 256 samples a step, at most 64 new tokens, temperature 1, the same model, reward,
learning rate, optimizer and loss (GRPO, no KL). Ours: trainer and vLLM server are processes that share the GPU, and
weights travel as deltas that are applied in place while answers are under way. TRL generates, then trains, then
generates. Both are measured from the end of the first tenth of the steps to the end of the last. The seconds to a
reward are those from the end of the first step until the mean of five steps reaches it.

`--decode host` has nodes decode deltas, as before vLLM's workers did.

    python -m bench.async_gpu --model smollm2-135m-instruct.gguf --json -

`--engine embedded --model tiny --steps 8 --batch 16` runs our side on a CPU, to try the script out.
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
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.common import Report, parser
from rillflow.observe.metrics import read_metrics
from rillflow.weights.models import SUFFIX, model_from_gguf

GROUP = 8
GOAL = 2.0
WINDOW = 10  # steps over which the reward is averaged, at the end
LEVELS, SHORT = (0.8, 0.9, 0.95), 5  # rewards to reach, and steps over which they are averaged


class Side(NamedTuple):
    """The end of each step, in seconds, and the mean reward of its samples."""

    ended: list[float]
    reward: list[float]

    def steps_per_second(self) -> float:
        first = max(1, len(self.ended) // 10)
        return (len(self.ended) - first) / (self.ended[-1] - self.ended[first - 1])

    def seconds_to(self, level: float) -> float | None:
        """Return when the reward is reached, or None if it is not."""
        for step in range(SHORT, len(self.reward) + 1):
            if statistics.mean(self.reward[step - SHORT : step]) >= level:
                return self.ended[step - 1] - self.ended[0]
        return None


def model_of(path: Path, made: Path) -> str:
    """`path`, or the Hugging Face folder of what the GGUF file `path` holds."""
    return str(model_from_gguf(path, made) if path.suffix == SUFFIX else path)


def settings(words: list[str]) -> dict[str, Any]:
    """Return settings given as KEY=VALUE."""
    return {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}


def recipe(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    on_gpu = arguments.engine == "vllm"
    dtype = "bf16" if on_gpu else "fp32"
    engine: dict[str, Any] = {"kind": arguments.engine, "slots": 512 if on_gpu else 64, "context": 192, "dtype": dtype}
    if on_gpu:
        by_workers = False if arguments.decode == "host" else None
        server = {"python": arguments.python, "memory": 0.25, "arguments": arguments.server}
        engine["server"] = {**server, "decodes_deltas": by_workers}
    engine["on_update"] = arguments.on_update
    questions = "rillflow.examples.addition:prompts"
    return {
        "name": "async_gpu",
        "seed": arguments.seed,
        "policies": {
            "agent": {
                "model": model,
                "sampling": {"temperature": 1.0, "max_tokens": 64},
                "engine": engine,
                "weights": {"mode": "delta"},
            }
        },
        "workflow": "rillflow.agents.workflows.question:play",
        "reward": "rillflow.examples.addition:reward",
        "data": {
            "prompts": {
                "generator": questions,
                "arguments": {"split": "train", "count": 1 << 16, "seed": arguments.seed},
            }
        },
        "dataflow": {"group_size": GROUP, "staleness": arguments.staleness, "filters": []},
        "trainer": {
            "algorithm": "grpo",
            "steps": arguments.steps,
            "batch_groups": arguments.batch // GROUP,
            "micro_tokens": 32768,
            "lr": arguments.lr,
            "weight_decay": 0.0,
            "dtype": dtype,
            "compile": on_gpu,
            "head_tokens": 8192 if on_gpu else 1024,
            "checkpoint_every": arguments.steps,
            **settings(arguments.trainer),
        },
        "rollout": {
            "nodes": arguments.nodes,
            "engines": arguments.engines,
            "episodes": arguments.episodes,
            "refresh_every": arguments.refresh,
            **settings(arguments.rollout),
        },
        "observe": {"trackers": {"tensorboard": False}, "plot": False},
        "runtime": {"start_timeout": 300},
    }


def ours(arguments: argparse.Namespace, model: str, folder: Path) -> tuple[Side, dict[str, float]]:
    """Our run, and what else there is to tell of it."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(arguments, model)))
    command = [sys.executable, "-m", "rillflow", "run", str(file), "--runs", str(folder / "runs")]
    before = set(folder.glob("runs/*"))
    done = subprocess.run(command, check=False, timeout=arguments.limit, stdout=sys.stderr)
    (run,) = set(folder.glob("runs/*")) - before
    if done.returncode:
        for log in sorted(run.glob("logs/*")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
        raise RuntimeError(f"our run ended with {done.returncode}")
    steps = read_metrics(run / "metrics.jsonl", "agent").of("agent")
    others = transfers(run)
    for key in sorted({key for step in steps for key in step if key.startswith(("weights", "consistency", "wait_f"))}):
        values = [step[key] for step in steps[len(steps) // 10 :] if isinstance(step.get(key), int | float)]
        others |= {f"median {key}": statistics.median(values)} if values else {}
    return Side([step["time"] for step in steps], [step["reward_mean"] for step in steps]), others


def trl(arguments: argparse.Namespace, model: str, folder: Path) -> Side:
    job = {"model": model, "steps": arguments.steps, "batch": arguments.batch, "group": GROUP}
    job |= {"lr": arguments.trl_lr or arguments.lr, "seed": arguments.seed}
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("async_gpu_trl.py")
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    # Without this folder on its path: transformers would take its kernels.py for the package `kernels`.
    command = [arguments.python, "-P", str(script), str(folder)]
    subprocess.run(command, check=True, timeout=arguments.limit, stdout=sys.stderr, env=environment)
    found = json.loads((folder / "trl.json").read_text())
    return Side(found["ended"], found["reward"])


_TRANSFER = re.compile(
    r"version \d+, (\w+), (\d+) bytes(?:, decoded by the engine)?: fetched in ([\d.]+) s, verified in ([\d.]+) s, "
    r"applied in ([\d.]+) s, ([\d.]+) s"
)


def transfers(run: Path) -> dict[str, float]:
    """Medians over the changes of weights that the engines' logs tell of, the first tenth left out."""
    found = [match for log in sorted(run.glob("logs/*.log")) for match in _TRANSFER.findall(log.read_text())]
    found = found[len(found) // 10 :]
    names = ("bytes", "seconds of fetching", "seconds of decoding", "seconds of the update", "seconds without a token")
    return {
        "weight updates": float(len(found)),
        "of them by delta": float(sum(kind == "delta" for kind, *_ in found)),
        **{
            f"an update's {name}": statistics.median(float(one[place]) for one in found)
            for place, name in enumerate(names, 1)
            if found
        },
    }


def tell(report: Report, batch: int, mine: Side, peer: Side | None, others: dict[str, float]) -> None:
    rate = mine.steps_per_second()
    other = None if peer is None else peer.steps_per_second()
    report.add("samples/s", rate * batch, other and other * batch, unit="samples/s", goal=GOAL)
    report.add("seconds a step", 1 / rate, other and 1 / other, unit="s", less_is_better=True)
    for name, at in (("first", slice(0, WINDOW)), ("last", slice(-WINDOW, None))):
        theirs = None if peer is None else statistics.mean(peer.reward[at])
        report.add(f"reward, {name} {WINDOW} steps", statistics.mean(mine.reward[at]), theirs, unit="reward")
    for level in LEVELS:
        taken, theirs = mine.seconds_to(level), None if peer is None else peer.seconds_to(level)
        name = f"seconds to reward {level:g}"
        if taken is None:
            print(f"{name}: not reached; TRL: {theirs}", file=sys.stderr)
        else:
            report.add(name, taken, theirs, unit="s", less_is_better=True)
    for name, value in others.items():
        report.add(name, value, None, unit="", reason="ours alone")


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default="tiny", help="a GGUF file or a Hugging Face folder")
    made.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    made.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM and TRL")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--batch", type=int, default=256, help="samples of a step")
    made.add_argument("--lr", type=float, default=5e-6)
    made.add_argument("--trl-lr", type=float, help="TRL's learning rate, if it is not ours")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--staleness", type=int, default=4)
    made.add_argument("--nodes", type=int, default=6)
    made.add_argument("--engines", type=int, default=1)
    made.add_argument("--episodes", type=int, default=128, help="that one node plays at once")
    made.add_argument("--refresh", type=float, default=0.05, help="seconds between two changes of weights, at least")
    made.add_argument("--limit", type=float, default=300.0, help="seconds that a side may take")
    made.add_argument("--server", action="append", default=[], help="a further argument of the vLLM server")
    made.add_argument("--trainer", action="append", default=[], metavar="KEY=VALUE", help="a setting of our trainer")
    made.add_argument("--rollout", action="append", default=[], metavar="KEY=VALUE", help="a setting of our nodes")
    made.add_argument("--on-update", choices=("refill", "keep"), default="refill", help="engine.on_update")
    made.add_argument("--decode", choices=("workers", "host"), default="workers", help="who decodes deltas")
    made.add_argument("--no-trl", action="store_true", help="our side alone")
    made.add_argument("--keep", help="keep what is written in this folder")
    return made.parse_args()


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tiny = arguments.model == "tiny"
        model = "tiny" if tiny else model_of(Path(arguments.model).resolve(), folder / "models")
        mine, others = ours(arguments, model, folder)
        peer = None if arguments.no_trl else trl(arguments, model, folder)
        report = Report("async_gpu")
        tell(report, arguments.batch, mine, peer, others)
        report.finish(arguments.json)


if __name__ == "__main__":
    main()
