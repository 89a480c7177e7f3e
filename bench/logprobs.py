"""Are the log-probs that an engine reports those that the trainer computes, however tokens are drawn?

A short run for each way to draw (temperature, top_p, top_k), with weights that do not change: the mean log-ratio of
trainer to engine, their mean distance and the share of tokens that a clip of 0.2 would cut, all of fresh tokens. The
goal is a limit: a mean log-ratio of at most 0.01 from 0.

    python -m bench.logprobs --model smollm2-135m-instruct.gguf --engine vllm --json -

`--engine embedded --model tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.async_gpu import GROUP, model_of
from bench.common import Report, parser
from rillflow.observe.metrics import read_metrics

LIMIT = 0.01
WAYS: dict[str, dict[str, float]] = {
    "T 1": {"temperature": 1.0},
    "T 0.6": {"temperature": 0.6},
    "T 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def recipe(arguments: argparse.Namespace, model: str, way: dict[str, float]) -> dict[str, Any]:
    served = arguments.engine != "embedded"
    engine: dict[str, Any] = {"kind": arguments.engine, "slots": 64, "context": 192, "dtype": arguments.dtype}
    if served:
        engine["server"] = {"python": os.path.abspath(arguments.python), "arguments": arguments.server}
        if arguments.memory:
            engine["server"]["memory"] = arguments.memory
    questions = "rillflow.examples.addition:prompts"
    return {
        "name": "logprobs",
        "seed": 1,
        "policies": {"agent": {"model": model, "sampling": {"max_tokens": 64} | way, "engine": engine}},
        "workflow": "rillflow.agents.workflows.question:play",
        "reward": "rillflow.examples.addition:reward",
        "data": {"prompts": {"generator": questions, "arguments": {"split": "train", "count": 4096, "seed": 1}}},
        "dataflow": {"group_size": GROUP, "staleness": 0, "filters": []},
        "trainer": {
            "steps": arguments.steps, "batch_groups": 16, "lr": 1e-12, "dtype": arguments.dtype,
            "micro_tokens": 16384, "checkpoint_every": 1000,
        },
        "rollout": {"nodes": 1, "episodes": 64},
        "observe": {"trackers": {"tensorboard": False}, "plot": False},
        "runtime": {"start_timeout": 300},
    }  # fmt: skip


def measured(arguments: argparse.Namespace, model: str, way: dict[str, float]) -> dict[str, float]:
    """The means over the steps of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(arguments, model, way)))
        command = [sys.executable, "-m", "rillflow", "run", "recipe.yaml"]
        done = subprocess.run(command, cwd=folder, check=False, timeout=arguments.limit, stdout=sys.stderr)
        (run,) = (folder / "runs").iterdir()
        if done.returncode:
            for log in sorted(run.glob("logs/*")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
            raise RuntimeError(f"the run ended with {done.returncode}")
        steps = read_metrics(run / "metrics.jsonl", "agent").of("agent")
    names = ("consistency/shift", "consistency/mean", "consistency/ratio", "clip_low", "clip_high")
    return {name: sum(step[name] for step in steps) / len(steps) for name in names}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", default="tiny", help="a GGUF file or a Hugging Face folder")
    made.add_argument("--engine", choices=("embedded", "vllm", "sglang"), default="embedded")
    made.add_argument("--python", default=sys.executable, help="the interpreter that has the engine's server")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--memory", type=float, default=0.0, help="the server's share of a GPU's memory")
    made.add_argument("--server", action="append", default=[], help="a further argument of the server")
    made.add_argument("--steps", type=int, default=2)
    made.add_argument("--limit", type=float, default=400.0, help="seconds that one run may take")
    arguments = made.parse_args()
    ways = dict(list(WAYS.items())[2:3]) if arguments.quick else WAYS
    report = Report("logprobs")
    with tempfile.TemporaryDirectory() as folder:
        tiny = arguments.model == "tiny"
        model = "tiny" if tiny else model_of(Path(arguments.model).resolve(), Path(folder))
        for name, way in ways.items():
            found = measured(arguments, model, way)
            alone = "the trainer's own log-probs are what it is held against"
            shift = abs(found["consistency/shift"])
            report.add(f"mean log-ratio, {name}", shift, None, unit="nats", limit=LIMIT, reason=alone)
            report.add(f"mean distance, {name}", found["consistency/mean"], None, unit="nats", reason=alone)
            clipped = found["clip_low"] + found["clip_high"]
            report.add(f"tokens that a clip cuts, {name}", clipped, None, unit="share", reason=alone)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
