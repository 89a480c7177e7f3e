"""Are the log-probs that an engine reports those that the trainer computes, however tokens are drawn, and what do they
cost?

A short run for each way to draw (temperature, top_p, top_k), with weights that do not change: the mean log-ratio of
trainer to engine, their mean distance and the share of tokens that a clip of 0.2 would cut, all of fresh tokens. The
goal is a limit: a mean log-ratio of at most 0.01 from 0. Then the engine's own rate for each way to draw, beside that
at temperature 1 without cuts, where the drawn and the raw log-prob of a token are the same.

    python -m bench.logprobs --model smollm2-135m-instruct.gguf --engine vllm --json -

`--engine embedded --model tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.async_gpu import GROUP, model_of
from bench.common import Report, parser
from rillflow.config import PolicyConfig
from rillflow.contracts import Engine
from rillflow.engine.build import build_engine
from rillflow.observe.metrics import read_metrics
from rillflow.types import GenerateRequest, Sampling

LIMIT = 0.01
SLOTS, PROMPT, ANSWER = 64, 40, 96  # of the rates
WAYS: dict[str, dict[str, float]] = {
    "T 1": {"temperature": 1.0},
    "T 0.6": {"temperature": 0.6},
    "T 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def engine_of(arguments: argparse.Namespace) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": arguments.engine, "slots": SLOTS, "context": 192, "dtype": arguments.dtype}
    if arguments.engine != "embedded":
        engine["server"] = {"python": os.path.abspath(arguments.python), "arguments": arguments.server}
        if arguments.memory:
            engine["server"]["memory"] = arguments.memory
    return engine


def recipe(arguments: argparse.Namespace, model: str, way: dict[str, float]) -> dict[str, Any]:
    engine = engine_of(arguments)
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


async def rates(arguments: argparse.Namespace, model: str) -> dict[str, float]:
    """Return the median tokens a second of each way to draw. The ways take turns."""
    repeats = 3 if arguments.quick else 7
    engine = build_engine(PolicyConfig(model=model, engine=engine_of(arguments)), exact=False)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    await engine.start()
    try:
        for repeat in range(-1, repeats):  # the first one warms up
            for name, way in WAYS.items():
                rate = await _rate(engine, Sampling(max_tokens=ANSWER, **way), f"{name} {repeat}")
                if repeat >= 0:
                    taken[name].append(rate)
    finally:
        await engine.close()
    return {name: statistics.median(series) for name, series in taken.items()}


async def _rate(engine: Engine, sampling: Sampling, seed: str) -> float:
    draw = random.Random(seed)

    async def one(number: int) -> int:
        tokens = [draw.randrange(500) for _ in range(PROMPT)]
        request = GenerateRequest(id=f"{seed} {number}", tokens=tokens, sampling=sampling)
        return sum([len(chunk.raw_logprobs) async for chunk in engine.generate(request)])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(number) for number in range(SLOTS)))
    return sum(counts) / (time.perf_counter() - began)


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
    made.add_argument("--only", choices=("agreement", "rates"), help="measure one of the two")
    arguments = made.parse_args()
    ways = dict(list(WAYS.items())[2:3]) if arguments.quick else WAYS
    report = Report("logprobs")
    with tempfile.TemporaryDirectory() as folder:
        tiny = arguments.model == "tiny"
        model = "tiny" if tiny else model_of(Path(arguments.model).resolve(), Path(folder))
        for name, way in ({} if arguments.only == "rates" else ways).items():
            found = measured(arguments, model, way)
            alone = "the trainer's own log-probs are what it is held against"
            shift = abs(found["consistency/shift"])
            report.add(f"mean log-ratio, {name}", shift, None, unit="nats", limit=LIMIT, reason=alone)
            report.add(f"mean distance, {name}", found["consistency/mean"], None, unit="nats", reason=alone)
            clipped = found["clip_low"] + found["clip_high"]
            report.add(f"tokens that a clip cuts, {name}", clipped, None, unit="share", reason=alone)
        if arguments.only != "agreement":
            plain, *others = asyncio.run(rates(arguments, model)).items()
            for name, rate in others:
                report.add(f"{name}, beside {plain[0]}", rate, plain[1], unit="tokens/s")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
