"""Real steps of our trainer on one GPU, with the shapes that other trainers publish figures of.

A step is a worker's: graph, advantages, loss, metrics and optimizer. Models have the shape of Qwen3 and random weights.
Every case runs in a process of its own, within `--limit` seconds. The published figures are prime-rl's, measured on one
H100 with activation checkpointing and flash attention 3 (`benchmarks/baselines` in its repository); our rows are as
long as the case says, which is the most attention that a pack of this size can need. `--trl` also times steps of TRL's
SFTTrainer with packing and Liger's kernels, for the cases of `_BESIDE_TRL`.

`attention` compares the kernels of one long row: their results, gradients and speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.common import Report, parser
from bench.trainer import PEAK_TFLOPS, SHAPES, Size, Task
from rillflow.config import LoraConfig, TrainerConfig
from rillflow.trainer import lora
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.attention.kernels import Cudnn, Flash, Heads, Spans
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import prepared

_GOAL = 2.0  # times prime-rl's tokens a second
_MFU = 45.0  # percent
_SECONDS, _QUICK = 12.0, 4.0  # of timed steps
_LORA = LoraConfig(rank=16)


@dataclass(frozen=True)
class Case:
    """A model's shape, the rows of a step, changes of the trainer's settings, and the published tokens a second."""

    shape: str
    size: Size
    settings: dict[str, Any] = field(default_factory=dict)
    published: float | None = None
    goal_mfu: float | None = None


def _long(length: int, rows: int = 2) -> Size:
    return Size(length, length, rows * length, length)


_16K, _65K, _RAGGED = _long(16_384), _long(65_536, 1), Size(200, 4000, 126_976, 16_384)
CASES: dict[str, Case] = {
    "0.6b-16k": Case("0.6b", _16K, {"recompute": True}, 11_896),
    "0.6b-16k-cudnn": Case("0.6b", _16K, {"recompute": True, "attention": "cudnn"}, 11_896),
    "0.6b-65k": Case("0.6b", _65K, {"recompute": True}, 10_147),
    "0.6b-65k-cudnn": Case("0.6b", _65K, {"recompute": True, "attention": "cudnn"}, 10_147),
    "4b-lora-16k": Case("4b", _16K, {"recompute": True, "attention": "cudnn", "lora": _LORA}, 6229),
    "4b-lora-16k-kept": Case("4b", _16K, {"attention": "cudnn", "lora": _LORA}, 6229),
    "1.7b-ragged": Case("1.7b", _RAGGED, {}, None, _MFU),
    "8b-muon": Case("8b", Size(4096, 4096, 32_768, 8192), {"recompute": True, "optimizer": "muon"}),
    "8b-offload": Case("8b", Size(4096, 4096, 32_768, 8192), {"recompute": True, "offload": "optimizer"}),
    "8b-adamw_8bit": Case("8b", Size(4096, 4096, 32_768, 8192), {"recompute": True, "optimizer": "adamw_8bit"}),
    "tiny": Case("tiny", Size(64, 64, 256, 64), {"recompute": True, "optimizer": "muon"}),
}
_BESIDE_TRL = ("0.6b-16k-cudnn", "4b-lora-16k", "4b-lora-16k-kept", "1.7b-ragged", "tiny")
_TRL_STEPS = 6  # of which the first two are not timed
ATTENTION = "attention"
_ON_GPU = [ATTENTION, *(name for name in CASES if name != "tiny")]


@dataclass
class Measured:
    """The result of a case. `mfu` is the trainer's own count of operations over the whole time of a step."""

    case: str
    tokens_per_second: float = 0.0
    mfu: float = 0.0  # percent
    peak: float = 0.0  # GiB
    step_seconds: float = 0.0
    warming: float = 0.0
    loss: float = 0.0
    steps: int = 0
    error: str = ""
    notes: dict[str, float] = field(default_factory=dict)


# ------------------------------------------------------------ one case, in its own process


def build(case: Case, device: torch.device) -> tuple[Task, Worker]:
    on_gpu = device.type == "cuda"
    task = Task(SHAPES[case.shape], case.size, device, "bf16" if on_gpu else "fp32")
    settings = {"compile": on_gpu, "head_tokens": 2048, "lr": 1e-6, "steps": 1000, **case.settings}
    config = TrainerConfig(dtype=task.dtype, micro_tokens=case.size.pack, **settings)
    model = task.model()
    if config.lora is not None:
        model = model.to(torch.bfloat16) if on_gpu else model
        lora.wrap(model, config.lora, 0)
    model = prepared(model, config)
    optimizer = Optimizer(model, config, Alone())
    actor = Learner("actor", model, PolicyForward(model, config), optimizer, config, Alone())
    return task, Worker(chain_of(config), {"actor": actor}, ALGORITHMS[config.algorithm](config), config, Alone())


def measure(name: str, device: torch.device, lasting: float) -> Measured:
    """Build a case, warm it up with two steps and time steps for `lasting` seconds, at least three."""
    task, worker = build(CASES[name], device)
    taken = Measured(name)
    speeds, mfus, seconds = [], [], []
    begun = time.perf_counter()
    for step in range(1000):
        data = task.rows(step)
        _wait(device)
        started = time.perf_counter()
        metrics = worker.step([data.rows], lambda: None, lambda: None)
        _wait(device)
        took = time.perf_counter() - started
        if step == 0:
            taken.loss = metrics["loss"]
        if step == 1:
            taken.warming, begun = time.perf_counter() - begun, time.perf_counter()
            _reset_peak(device)
        if step < 2:
            continue
        tokens = float((data.rows.length_R - 1).sum())
        speeds.append(tokens / took)
        # The trainer's own figure is over the time in which it computed.
        mfus.append(100 * metrics["mfu"] * (metrics["tokens"] / metrics["tokens_per_second"]) / took)
        seconds.append(took)
        if len(speeds) >= 3 and time.perf_counter() - begun > lasting:
            break
    taken.tokens_per_second, taken.mfu = statistics.median(speeds), statistics.median(mfus)
    taken.step_seconds, taken.steps = statistics.median(seconds), len(seconds)
    if device.type == "cuda":
        taken.peak = torch.cuda.max_memory_allocated() / 2**30
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------ attention alone


def compare_attention(device: torch.device, length: int = 16_384) -> Measured:
    """One causal row, 16 heads of queries on 8 of keys, by flash attention and by cuDNN."""
    taken = Measured(ATTENTION)
    torch.manual_seed(0)
    heads = Heads(*(torch.randn(length, count, 128, device=device, dtype=torch.bfloat16) for count in (16, 8, 8)))
    edges = torch.tensor([0, length], dtype=torch.int32, device=device)
    spans, scale = Spans(edges, edges, length, length, causal=True), 128**-0.5
    grad = torch.randn_like(heads.query)
    results = []
    for name, kernel in (("flash", Flash()), ("cudnn", Cudnn())):
        found = kernel.forward(heads, spans, scale)
        results.append((*found, *kernel.backward(grad, heads, found, spans, scale)))
        forward = _timed(lambda kernel=kernel: kernel.forward(heads, spans, scale))  # type: ignore[misc]
        backward = _timed(lambda k=kernel, f=found: k.backward(grad, heads, f, spans, scale))  # type: ignore[misc]
        work = 2.0 * 16 * 128 * length**2 / 1e12  # of a causal forward pass; the backward pass has 2.5 times as much
        taken.notes |= {f"{name} forward TFLOP/s": work / forward, f"{name} backward TFLOP/s": 2.5 * work / backward}
    for what, one, other in zip(("out", "lse", "query", "key", "value"), *results, strict=True):
        apart = (one.float() - other.float()).norm() / one.float().norm()
        taken.notes[f"{what}: relative difference"] = float(apart)
    return taken


def _timed(run: Any, times: int = 10) -> float:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


# ------------------------------------------------------------ all cases


def run_apart(name: str, arguments: argparse.Namespace) -> Measured:
    """Run a case in a process; an error or a timeout becomes its result."""
    command = [sys.executable, "-m", "bench.trainer_gpu", "--only", name, "--device", arguments.device]
    command += ["--quick"] if arguments.quick else []
    # The 8B model leaves little room for fragments.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=arguments.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Measured(name, error=f"not done after {arguments.limit:.0f} s")
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return Measured(name, error=last[0][:200])
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def run_trl(name: str, arguments: argparse.Namespace) -> Measured:
    """Time TRL's steps on as many tokens."""
    case, taken = CASES[name], Measured(f"{name}: TRL")
    size, lora_config = case.size, case.settings.get("lora")
    packs = max(round(size.tokens / size.pack), 1)
    draw = np.random.default_rng(0)
    # Packing leaves some room in every pack, so there are rows to spare.
    count = 2 * _TRL_STEPS * packs * size.pack // ((size.shortest + size.longest) // 2)
    job = {
        "shape": SHAPES[case.shape], "pack": size.pack, "packs": packs, "steps": _TRL_STEPS,
        "lora": lora_config.rank if lora_config else 0, "recompute": bool(case.settings.get("recompute")),
        "lengths": draw.integers(size.shortest, size.longest + 1, count).tolist(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        given, found = Path(temporary, "job.json"), Path(temporary, "found.json")
        given.write_text(json.dumps(job))
        # Without this folder on its path: transformers would take its kernels.py for the package `kernels`.
        script = Path(__file__).with_name("trainer_gpu_trl.py")
        command = [arguments.trl, "-P", str(script), str(given), str(found)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit, check=False)
        except subprocess.TimeoutExpired:
            return replace(taken, error=f"not done after {arguments.limit:.0f} s")
        if done.returncode:
            sys.stderr.write(done.stderr[-4000:])
            return replace(taken, error=(done.stderr.strip().splitlines() or ["no output"])[-1][:200])
        said = json.loads(found.read_text())
    steps = np.diff(said["ended"])[1:]
    seconds = float(np.median(steps))
    notes = {"Liger": float(said["liger"])}
    return replace(
        taken, tokens_per_second=said["tokens"] / seconds, peak=said["peak"], step_seconds=seconds,
        steps=len(steps), notes=notes,
    )  # fmt: skip


def show(results: list[Measured]) -> None:
    table = Table(title="steps of a trainer")
    for heading in ("case", "tokens/s", "MFU %", "peak GiB", "step s", "warm-up s", "first loss", "note"):
        table.add_column(heading, justify="left" if heading in {"case", "note"} else "right")
    for taken in results:
        cells = (f"{taken.tokens_per_second:,.0f}", f"{taken.mfu:.1f}", f"{taken.peak:.1f}")
        cells += (f"{taken.step_seconds:.2f}", f"{taken.warming:.0f}", f"{taken.loss:.5f}")
        notes = ", ".join(f"{name} {value:.4g}" for name, value in taken.notes.items())
        table.add_row(taken.case, *cells, taken.error or notes)
    Console(width=180).print(table)


def add_rows(report: Report, taken: Measured, peer: Measured | None) -> None:
    case = CASES.get(taken.case)
    if case is None or taken.error:
        report.add(f"{taken.case}: ran", float(not taken.error), None, unit="", reason=taken.error)
        return
    speed, goal = taken.tokens_per_second, _GOAL if case.published else None
    report.add(f"{taken.case}: tokens a second", speed, case.published, unit="tokens/s", goal=goal)
    goal_mfu = 1.0 if case.goal_mfu else None
    report.add(f"{taken.case}: model FLOPs utilisation", taken.mfu, case.goal_mfu, unit="%", goal=goal_mfu)
    if peer is not None and not peer.error:
        report.add(f"{taken.case}: tokens a second (peer: TRL)", speed, peer.tokens_per_second, unit="tokens/s")
    beside = None if peer is None or peer.error else peer.peak or None
    report.add(f"{taken.case}: peak memory", taken.peak, beside, unit="GiB", less_is_better=True)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--cases", help=f"comma-separated, of {', '.join(_ON_GPU)}, tiny; default all, on a CPU tiny")
    made.add_argument("--limit", type=float, default=150.0, help="most seconds of a case")
    made.add_argument("--trl", metavar="PYTHON", help="time TRL's steps, too, with this interpreter")
    made.add_argument("--only", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    device = torch.device(arguments.device)
    if arguments.only:
        lasting = _QUICK if arguments.quick else _SECONDS
        one = compare_attention(device) if arguments.only == ATTENTION else measure(arguments.only, device, lasting)
        sys.stdout.write(json.dumps(asdict(one)) + "\n")
        return
    names = arguments.cases.split(",") if arguments.cases else _ON_GPU if device.type == "cuda" else ["tiny"]
    results, peers = [], {}
    for name in names:
        results.append(run_apart(name, arguments))
        sys.stderr.write(f"{json.dumps(asdict(results[-1]))}\n")
        if arguments.trl and name in _BESIDE_TRL:
            peers[name] = run_trl(name, arguments)
            sys.stderr.write(f"{json.dumps(asdict(peers[name]))}\n")
    show(results + list(peers.values()))
    report = Report("trainer_gpu")
    for taken in results:
        add_rows(report, taken, peers.get(taken.case))
    report.finish(arguments.json, peak_tflops=PEAK_TFLOPS)


if __name__ == "__main__":
    main()
