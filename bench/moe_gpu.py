"""A mixture of experts that is trained and served at once: how far apart are the log-probs of engine and trainer, with
and without replay of the engine's routing?

A Qwen3-MoE-shaped model with random weights (3.0B parameters, 64 experts of which a token gets 8) is trained by the
ordinary command, one run with `trainer.replay_routing` and one without it. Every version is published, written into the
engine in place and proven by its probe. Distances are those of fresh tokens, over all steps after the first. A run is
killed after its steps, because a checkpoint of such a model takes longer than they do. The second run starts while the
first one trains.

    python -m bench.moe_gpu --model smollm2-135m-instruct.gguf --json -

`--model` gives the tokenizer. `--quick` runs a tiny mixture with the embedded engine on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.async_gpu import GROUP, model_of, transfers
from bench.common import Report, parser

LARGE: dict[str, int] = {
    "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384, "intermediate_size": 6144,
}  # fmt: skip
TINY: dict[str, int] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip
_RANGE = 0.05  # of the random weights: large enough that every token and every expert matter
_REWARD = Path(__file__).with_name("moe_gpu_reward.py")
_LOOK_SECONDS = 0.5


def make_model(shape: dict[str, int], tokens: Path, folder: Path) -> int:
    """Write a model with random weights and the tokenizer of the folder `tokens`; return its number of parameters."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    known = AutoConfig.from_pretrained(tokens)
    config = Qwen3MoeConfig(
        **shape,
        vocab_size=known.vocab_size,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
        max_position_embeddings=2048,
        initializer_range=_RANGE,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for file in tokens.iterdir():
        if file.name not in {"config.json", "generation_config.json"} and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def recipe(arguments: argparse.Namespace, model: Path, *, replay: bool) -> dict[str, Any]:
    small, dtype = arguments.quick, "fp32" if arguments.quick else "bf16"
    engine: dict[str, Any] = {"kind": arguments.engine, "slots": 64, "context": 192, "dtype": dtype}
    if arguments.engine == "vllm":
        server = {"python": arguments.python, "memory": arguments.memory, "arguments": arguments.server}
        engine["server"] = server | {"start_timeout": 240}
    questions = "rillflow.examples.addition:prompts"
    return {
        "name": "moe",
        "seed": 1,
        "policies": {
            "agent": {
                "model": str(model),
                "sampling": {"temperature": 1.0, "max_tokens": 16 if small else 64},
                "engine": engine,
                "weights": {"mode": "delta", "snapshot_every": 1000},  # every version is a delta but the first
            }
        },
        "workflow": "rillflow.agents.workflows.question:play",
        "reward": f"{_REWARD}:reward",
        "data": {"prompts": {"generator": questions, "arguments": {"split": "train", "count": 4096, "seed": 1}}},
        "dataflow": {"group_size": GROUP, "staleness": 0, "filters": []},
        "trainer": {
            "steps": 1000, "batch_groups": 2 if small else 16, "lr": 1e-5, "dtype": dtype, "micro_tokens": 8192,
            "checkpoint_every": 1000, "replay_routing": replay,
        },
        "rollout": {"nodes": 1, "episodes": 64},
        "observe": {"trackers": {"tensorboard": False}, "plot": False},
        "runtime": {"start_timeout": 300},
    }  # fmt: skip


class Run:
    """A run of the command, which is killed at the end."""

    def __init__(self, arguments: argparse.Namespace, model: Path, folder: Path, *, replay: bool) -> None:
        folder.mkdir()
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(arguments, model, replay=replay)))
        self._folder = folder
        self._deadline = time.monotonic() + arguments.limit
        command = [sys.executable, "-m", "rillflow", "run", "recipe.yaml"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, count: int) -> list[dict[str, Any]]:
        """Return the metrics of the steps, once there are `count`."""
        while len(steps := self._steps()) < count:
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                raise RuntimeError(f"the run has made {len(steps)} of {count} steps:\n{self._words()}")
            time.sleep(_LOOK_SECONDS)
        return steps[:count]

    def end(self) -> None:
        """Kill all of its processes at once. One that is asked to end would write a checkpoint."""
        if self._process.poll() is None:
            started = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(60)
            psutil.wait_procs(started, timeout=60)

    def _steps(self) -> list[dict[str, Any]]:
        lines = [line for file in self._folder.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
        return [entry for entry in map(_decoded, lines) if "consistency/tokens" in entry]

    def transfers(self) -> dict[str, float]:
        """Return what the engine's log says of its updates."""
        (run,) = (self._folder / "runs").iterdir()
        return transfers(run)

    def _words(self) -> str:
        logs = [self._folder / "log", *sorted(self._folder.glob("runs/*/logs/*"))]
        return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n" for log in logs if log.is_file())


def _decoded(line: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # being written
        return {}
    return entry


def apart(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the distances over steps, weighted by their fresh tokens; the p99 is the highest of a step."""
    tokens = sum(step["consistency/tokens"] for step in steps)
    weighted = {
        name: sum(step[f"consistency/{name}"] * step["consistency/tokens"] for step in steps) / tokens
        for name in ("mean", "shift")
    }
    return weighted | {"p99": max(step["consistency/p99"] for step in steps), "tokens": tokens}


def measure(arguments: argparse.Namespace, model: Path, folder: Path) -> dict[bool, dict[str, float]]:
    """Return the distances with replay and without."""
    found: dict[bool, dict[str, float]] = {}
    first = second = None
    try:
        first = Run(arguments, model, folder / "replay", replay=True)
        first.wait(min(2, arguments.steps))
        second = Run(arguments, model, folder / "plain", replay=False)
        for replay, run in ((True, first), (False, second)):
            steps = run.wait(arguments.steps)
            found[replay] = apart(steps[1:]) | run.transfers()
            run.end()
    finally:
        for run in (first, second):
            if run is not None:
                run.end()
    return found


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default="tiny", help="a GGUF file or a Hugging Face folder: its tokenizer is used")
    made.add_argument("--engine", choices=("vllm", "embedded"), help="default vllm, with --quick embedded")
    made.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    made.add_argument("--memory", type=float, default=0.12, help="the server's share of the GPU's memory")
    made.add_argument("--server", action="append", help="a further argument of the vLLM server")
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--limit", type=float, default=400.0, help="seconds that a run may take")
    arguments = made.parse_args()
    arguments.engine = arguments.engine or ("embedded" if arguments.quick else "vllm")
    # A size of the cache spares vLLM the measuring of memory, which fails while other processes take some.
    arguments.server = arguments.server or ["--enforce-eager", "--kv-cache-memory-bytes=4000000000"]
    return arguments


def main() -> None:
    arguments, report = read_arguments(), Report("moe_gpu")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        from rillflow.weights.model_folder import model_folder

        tiny = arguments.model == "tiny"
        tokens = model_folder("tiny") if tiny else Path(model_of(Path(arguments.model).resolve(), folder / "tokens"))
        parameters = make_model(TINY if arguments.quick else LARGE, tokens, folder / "model")
        print(f"{parameters:,} parameters written after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        found = measure(arguments, folder / "model", folder)
    for what in ("mean", "p99"):
        report.add(
            f"distance of log-probs, {what}: with replay, without it", found[True][what], found[False][what],
            unit="nats", less_is_better=True,
        )  # fmt: skip
    alone = "of the run with replay"
    for name, value in found[True].items():
        if name not in ("mean", "p99"):
            report.add(name, value, None, unit="", reason=alone)
    report.add("seconds in all", time.perf_counter() - began, None, unit="s", reason="models, starts and both runs")
    report.finish(arguments.json, parameters=parameters, found={str(key): value for key, value in found.items()})


if __name__ == "__main__":
    main()
