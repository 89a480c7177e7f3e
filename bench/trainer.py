"""Our training step against the plain Hugging Face loop, on Qwen3-shaped models with random weights.

Both train the same ragged rows (200 to 4,000 tokens, new ones for each step) with the same importance-weighted loss on
every token, from the same weights, and take turns.

* ours: packs of 8k tokens without padding, bf16 copies of fp32 masters, compiled layers, the head in pieces, AdamW.
* plain: batches padded to their longest row (rows of like length together, at most 8k tokens with padding), fp32
  weights under bf16 autocast, `model(...).logits`, `log_softmax`, AdamW. If its memory does not suffice, smaller ones.

Model FLOPs are what the mathematics of real tokens needs: 6 a weight and token, 6 L H D s^2 for causal attention over a
row of s tokens; nothing for padding or recomputing. `--variants` compares ways to run ours.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.common import Report, parser
from rillflow.config import TrainerConfig
from rillflow.trainer.batches import Databuffer, make_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.packing import micro_batches
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import prepared
from rillflow.types import BatchSample, Row

GOAL_MFU = 45.0  # percent, of the largest model
PEAK_TFLOPS = 989.0  # an H100's or H200's, dense bf16
_QWEN = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {**_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151_936},
    "1.7b": {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151_936},
    "4b": {
        **_QWEN, "num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 2560, "intermediate_size": 9728,
        "vocab_size": 151_936,
    },
    "8b": {
        **_QWEN, "num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 12_288,
        "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_size": 64, "intermediate_size": 192, "vocab_size": 2048,
    },
}  # fmt: skip
# The overrides of each variant of ours.
VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "eager": {"compile": False},
    "recompute": {"recompute": True},
    "sdpa": {"attention": "sdpa"},
    "flex": {"attention": "flex"},
    "padded": {"attention": "padded"},
    "head-1024": {"head_tokens": 1024},
    "head-8192": {"head_tokens": 8192},
    "packs-16k": {"micro_tokens": 16_384},
    "packs-4k": {"micro_tokens": 4096},
}
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, AssertionError)


# ------------------------------------------------------------ the task


class Size(NamedTuple):
    """How much is trained in a step: rows of `shortest` to `longest` tokens, `tokens` in all, in packs of `pack`."""

    shortest: int
    longest: int
    tokens: int
    pack: int


@dataclass(frozen=True)
class Task:
    shape: dict[str, int]
    size: Size
    device: torch.device
    dtype: str

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        shape = {"tie_word_embeddings": True, **self.shape}
        config = Qwen3Config(**shape, max_position_embeddings=self.size.longest)
        config._attn_implementation = "sdpa"
        with self.device:
            model: PreTrainedModel = Qwen3ForCausalLM(config).eval()
        return model

    def rows(self, step: int) -> Databuffer:
        """The rows of a step. Every token but the first is trained."""
        rng = np.random.default_rng(step)
        lengths: list[int] = []
        while sum(lengths) < self.size.tokens:
            lengths.append(int(rng.integers(self.size.shortest, self.size.longest + 1)))
        rows = make_rows(*zip(*(self._row(rng, n, length) for n, length in enumerate(lengths)), strict=True))
        return Databuffer(rows).adding({"advantage_N": rng.normal(size=len(rows.tokens_N)).astype(np.float32)})

    def _row(self, rng: np.random.Generator, number: int, length: int) -> tuple[BatchSample, dict[str, Any]]:
        old = np.full(length, -math.log(self.shape["vocab_size"]), "<f4")
        mask = np.ones(length, "u1")
        mask[0] = 0
        columns = {
            "tokens": rng.integers(0, self.shape["vocab_size"], length).astype("<i4"),
            "mask": mask,
            "logprobs": old,
            "raw_logprobs": old,
            "temperatures": np.ones(length, "<f4"),
            "versions": np.zeros(length, "<i4"),
        }
        sample = BatchSample(
            id=str(number), row=Row(unit="u", segment=0, offset=number, length=1), tokens=length, trained=length - 1,
            reward=float(rng.normal()), group="g", group_mean=0.0, group_std=1.0, group_size=8, staleness=0,
            truncated=False,
        )  # fmt: skip
        return sample, columns

    def flops(self, read_R: np.ndarray, weights: int) -> float:
        """Return the FLOPs of a step on rows of which the model reads `read_R` tokens."""
        heads = self.shape["num_hidden_layers"] * self.shape["num_attention_heads"] * self.shape["head_dim"]
        return float(6 * weights * read_R.sum() + 6 * heads * np.square(read_R.astype(float)).sum())


def loss_of(new_T: torch.Tensor, old_T: torch.Tensor, advantage_T: torch.Tensor) -> torch.Tensor:
    return -((new_T - old_T).exp() * advantage_T).sum()


# ------------------------------------------------------------ who runs it


class Ours:
    def __init__(self, task: Task, changes: dict[str, Any]) -> None:
        on_gpu = task.device.type == "cuda"
        settings = {"compile": on_gpu, "micro_tokens": task.size.pack, "head_tokens": 2048, **changes}
        self.config = TrainerConfig(dtype=task.dtype, **settings)
        self.task = task
        self.model = prepared(task.model(), self.config)
        self.optimizer = Optimizer(self.model, self.config, Alone())
        self.forward = PolicyForward(self.model, self.config)

    def step(self, data: Databuffer) -> float:
        self.optimizer.zero()
        total = torch.zeros((), device=self.task.device)
        for make in micro_batches(data, ["advantage_N"], self.config.micro_tokens, device=self.task.device):
            micro = make()
            new_T, _ = self.forward(micro)
            loss = loss_of(new_T, micro.columns["old_T"], micro.columns["advantage_T"])
            loss.backward()
            total += loss.detach()
        count = int(data.rows.trained_R.sum())
        self.optimizer.update(1 / count)
        return float(total) / count


class Plain:
    def __init__(self, task: Task, budget: int) -> None:
        self.task = task
        self.budget = budget
        self.model = task.model()
        config = TrainerConfig()
        self.max_norm = config.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def step(self, data: Databuffer) -> float:
        self.optimizer.zero_grad()
        count = int(data.rows.trained_R.sum())
        total = torch.zeros((), device=self.task.device)
        for index_B in self._batches(data.rows.length_R):
            loss = self._loss(data, index_B) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return float(total)

    def _batches(self, length_R: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of like length together, in batches whose padded size keeps the budget."""
        order = np.argsort(-length_R, kind="stable")
        while len(order):
            fit = max(self.budget // int(length_R[order[0]]), 1)
            yield order[:fit]
            order = order[fit:]

    def _loss(self, data: Databuffer, index_B: np.ndarray) -> torch.Tensor:
        device, rows = self.task.device, data.rows
        length_B = rows.length_R[index_B]
        at_BL = rows.start_R[index_B, None] + np.arange(length_B.max())[None]
        real_BL = np.arange(length_B.max())[None] < length_B[:, None]
        at_BL = np.where(real_BL, at_BL, 0)

        def of(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.where(real_BL, column[at_BL], 0)).to(device)

        tokens, real = of(rows.tokens_N.astype(np.int64)), torch.from_numpy(real_BL).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.task.dtype == "bf16"):
            logits = self.model(input_ids=tokens[:, :-1], attention_mask=real[:, :-1].long(), use_cache=False).logits
        new = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        trained = real[:, 1:]
        return loss_of(new[trained], of(rows.old_N)[:, 1:][trained], of(data["advantage_N"])[:, 1:][trained])


# ------------------------------------------------------------ measuring


@dataclass
class Taken:
    """The results of a contender's turns."""

    speeds: list[float] = field(default_factory=list)  # real tokens a second
    mfus: list[float] = field(default_factory=list)  # percent
    peak: float = 0.0  # GiB
    warming: float = 0.0  # seconds of the first turn's first steps
    first_loss: float = math.nan
    error: str = ""

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def mfu(self) -> float:
        return statistics.median(self.mfus) if self.mfus else 0.0


class Meter:
    def __init__(self, task: Task, peak_tflops: float, warm: int, steps: int) -> None:
        self.task, self.peak, self.warm, self.steps = task, peak_tflops * 1e12, warm, steps

    def turn(self, make: Callable[[], Ours | Plain], taken: Taken) -> None:
        """Build a contender, warm it up, time its steps, and let go of it. A failure is recorded, not raised."""
        contender: Ours | Plain | None = None
        try:
            contender = make()
            self._run(contender, taken)
        except _FAILURES as error:
            traceback.print_exc(file=sys.stderr)
            taken.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100] if str(error) else ''}"
        finally:
            del contender
            self._free()

    def _run(self, contender: Ours | Plain, taken: Taken) -> None:
        if self.task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        weights = sum(parameter.numel() for parameter in contender.model.parameters())
        for step in range(self.warm + self.steps):
            data = self.task.rows(step)
            seconds, loss = self._timed(contender, data)
            read_R = data.rows.length_R - 1
            if not step and math.isnan(taken.first_loss):
                taken.first_loss = loss
            if step < self.warm:
                taken.warming += seconds if not taken.speeds else 0.0
                continue
            taken.speeds.append(float(read_R.sum()) / seconds)
            taken.mfus.append(100 * self.task.flops(read_R, weights) / seconds / self.peak)
        if self.task.device.type == "cuda":
            taken.peak = max(taken.peak, torch.cuda.max_memory_allocated() / 2**30)

    def _timed(self, contender: Ours | Plain, data: Databuffer) -> tuple[float, float]:
        self._wait()
        started = time.perf_counter()
        loss = contender.step(data)
        self._wait()
        return time.perf_counter() - started, loss

    def _wait(self) -> None:
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        torch.compiler.reset()  # a contender's turn does not depend on what was compiled for others
        gc.collect()
        if self.task.device.type == "cuda":
            torch.cuda.empty_cache()


def plain_turn(meter: Meter, taken: Taken, budget: list[int]) -> None:
    """With the largest padded batches that fit: `budget` holds what has fitted so far."""
    while budget[0] >= meter.task.size.longest // 8:
        taken.error = ""
        meter.turn(lambda: Plain(meter.task, budget[0]), taken)
        if "OutOfMemory" not in taken.error:
            return
        budget[0] //= 2


def measure(task: Task, arguments: argparse.Namespace, variants: Sequence[str]) -> tuple[dict[str, Taken], str, Taken]:
    """All variants, the plain loop, and the name of our fastest. All take turns; one that has failed gets no more."""
    meter = Meter(task, arguments.peak_tflops, arguments.warm, arguments.steps)
    ours = {name: Taken() for name in variants}
    plain, budget = Taken(), [task.size.pack]
    for _ in range(arguments.rounds):
        for name, taken in ours.items():
            if not taken.error:
                meter.turn(lambda name=name: Ours(task, VARIANTS[name]), taken)  # type: ignore[misc]
        if not arguments.no_plain and (not plain.error):
            plain_turn(meter, plain, budget)
    if budget[0] != task.size.pack:
        plain.error = plain.error or f"batches of {budget[0]} tokens: larger ones do not fit"
    return ours, max(ours, key=lambda name: ours[name].speed), plain


# ------------------------------------------------------------ telling


def show(size: str, ours: dict[str, Taken], plain: Taken) -> None:
    table = Table(title=f"{size}: real tokens a second, model FLOPs utilisation, peak memory")
    for heading in ("who", "tokens/s", "MFU %", "peak GiB", "warm-up s", "first loss", "note"):
        table.add_column(heading, justify="left" if heading in {"who", "note"} else "right")
    for name, taken in {**{f"ours {name}": taken for name, taken in ours.items()}, "plain": plain}.items():
        cells = (f"{taken.speed:,.0f}", f"{taken.mfu:.1f}", f"{taken.peak:.1f}", f"{taken.warming:.0f}")
        table.add_row(name, *cells, f"{taken.first_loss:.5f}", taken.error)
    Console(stderr=True, width=140).print(table)


def report_size(report: Report, size: str, best: Taken, plain: Taken, *, last: bool) -> None:
    if not best.speed:
        report.add(f"{size}: tokens a second", 0.0, None, unit="tokens/s", reason=best.error)
        return
    reason = plain.error
    report.add(f"{size}: tokens a second", best.speed, plain.speed or None, unit="tokens/s", goal=1.0, reason=reason)
    report.add(f"{size}: model FLOPs utilisation", best.mfu, plain.mfu or None, unit="%", reason=reason)
    if best.peak:
        report.add(
            f"{size}: peak memory", best.peak, plain.peak or None, unit="GiB", goal=1.0, less_is_better=True,
            reason=reason,
        )  # fmt: skip
    if last:
        report.add(f"{size}: utilisation against the goal", best.mfu, GOAL_MFU, unit="%", goal=1.0)


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--sizes", help=f"of {', '.join(SHAPES)}; default 0.6b,1.7b on a GPU, else tiny")
    made.add_argument("--variants", default="compiled", help=f"all, or some of {', '.join(VARIANTS)}")
    made.add_argument("--dtype", choices=("bf16", "fp32"), help="default bf16 on a GPU, else fp32")
    made.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="what utilisation is measured against")
    made.add_argument("--tokens", type=int, help="tokens of a step; default 126976 on a GPU, which fills 16 packs")
    made.add_argument("--no-plain", action="store_true", help="only ours")
    made.add_argument("--rounds", type=int, help="turns of each; default 2, with --quick 1")
    made.add_argument("--warm", type=int, default=2, help="steps of a turn before its time is taken")
    made.add_argument("--steps", type=int, help="timed steps of a turn; default 4, with --quick 2")
    found = made.parse_args()
    found.rounds = found.rounds or (1 if found.quick else 2)
    found.steps = found.steps or (2 if found.quick else 4)
    return found


def main() -> None:
    arguments = read_arguments()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    sizes = (arguments.sizes or ("0.6b,1.7b" if on_gpu else "tiny")).split(",")
    variants = list(VARIANTS) if arguments.variants == "all" else arguments.variants.split(",")
    size = (
        Size(200, 4000, arguments.tokens or 126_976, 8192) if on_gpu else Size(20, 400, arguments.tokens or 4096, 1024)
    )
    report = Report("trainer")
    for number, name in enumerate(sizes, start=1):
        task = Task(SHAPES[name], size, device, arguments.dtype or ("bf16" if on_gpu else "fp32"))
        ours, best, plain = measure(task, arguments, variants)
        show(name, ours, plain)
        report_size(report, name, ours[best], plain, last=on_gpu and number == len(sizes))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
