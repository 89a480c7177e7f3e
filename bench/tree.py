"""Training on groups that share a prefix: as a tree, against the same rows one by one.

A step is forward and backward of the sum of the answers' log-probs, in one micro-batch. Every group has rows of equal
length whose first part, the given fraction of it, is the same. All sides compute the same numbers (checked) with the
same code, model and weights, and take turns. On a GPU all of them run with compiled layers.

* tree: the shared prefix is computed once.
* flat: rows packed end to end without padding, our best way without trees: the peer.
* padded: rows padded to the longest. Here none is longer, so nothing is lost by padding either: see `bench.trainer`.

Memory is what a step holds beyond model and gradients: on a GPU the highest it had allocated, on the CPU what autograd
keeps from the forward pass for the backward pass. Lengths show how cost grows at a fraction of 0.9.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.common import Report, interleave, parser
from bench.trainer import SHAPES
from rillflow.config import TrainerConfig
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import MicroBatch, micro_batches
from rillflow.trainer.roles import prepared

FRACTIONS = (0.2, 0.5, 0.8, 0.9, 0.95)
GOAL_AT, GOAL = 0.9, 3.0
SMALL = {
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "hidden_size": 256, "intermediate_size": 768, "vocab_size": 2048,
}  # fmt: skip


class Case(NamedTuple):
    """`groups` groups of `size` rows of `length` tokens, of which a `fraction` is common to the group."""

    fraction: float
    length: int
    size: int
    groups: int

    def __str__(self) -> str:
        return f"{self.fraction:.2f} shared, {self.groups} x {self.size} rows of {self.length}"


def make_rows(case: Case, vocabulary: int) -> Rows:
    """The answers, which come after the prefix, are trained."""
    rng = np.random.default_rng(0)
    prefix = round(case.fraction * case.length)
    tokens = rng.integers(0, vocabulary, (case.groups, case.size, case.length), dtype=np.int32)
    tokens[:, :, :prefix] = tokens[:, :1, :prefix]
    count = case.groups * case.size
    mask = np.arange(case.length) >= max(prefix, 1)
    numbers, whole, flags = np.zeros(count), np.zeros(count, np.int64), np.zeros(count, bool)
    return Rows(
        tokens_N=tokens.reshape(-1),
        mask_N=np.tile(mask, count),
        old_N=np.zeros(tokens.size, np.float32),
        temperature_N=np.ones(tokens.size, np.float32),
        fresh_N=np.zeros(tokens.size, np.bool_),
        start_R=np.arange(count) * case.length,
        length_R=np.full(count, case.length),
        reward_R=numbers,
        group_mean_R=numbers,
        group_std_R=numbers,
        group_size_R=whole,
        staleness_R=whole,
        truncated_R=flags,
        replayed_R=flags,
        member_R=whole,
        alike_R=whole,
        step_reward_N=np.full(tokens.size, np.nan, np.float32),
        kept_R=whole,
    )


class Bench:
    """A model and the ways to train it."""

    def __init__(self, shape: str, device: torch.device, longest: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.shape = SMALL if shape == "small" else SHAPES[shape]
        config = Qwen3Config(**self.shape, tie_word_embeddings=True, max_position_embeddings=longest)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.model: PreTrainedModel = Qwen3ForCausalLM(config).eval().to(dtype)
        on_gpu = device.type == "cuda"
        settings: dict[str, Any] = {"dtype": "bf16" if on_gpu else "fp32", "compile": on_gpu, "head_tokens": 2048}
        self.model = prepared(self.model, TrainerConfig(**settings))
        self.ways = {
            "tree": (True, PolicyForward(self.model, TrainerConfig(trees=True, **settings))),
            "flat": (False, PolicyForward(self.model, TrainerConfig(**settings))),
            "padded": (False, PolicyForward(self.model, TrainerConfig(attention="padded", **settings))),
        }

    def micro(self, way: str, case: Case) -> MicroBatch:
        data = Databuffer(make_rows(case, self.shape["vocab_size"]))
        (make,) = micro_batches(data, [], 1 << 30, device=self.device, trees=self.ways[way][0])
        return make()

    def step(self, way: str, micro: MicroBatch) -> float:
        """Forward and backward; the mean log-prob."""
        self.model.zero_grad(set_to_none=False)
        logprob_T, _ = self.ways[way][1](micro)
        loss = -logprob_T.sum()
        loss.backward()
        return float(loss.detach()) / len(logprob_T)

    def seconds(self, way: str, micro: MicroBatch) -> Callable[[int], float]:
        def measure(_: int) -> float:
            self._settle()
            started = time.perf_counter()
            self.step(way, micro)
            self._settle()
            return time.perf_counter() - started

        return measure

    def megabytes(self, way: str, micro: MicroBatch) -> float:
        if self.device.type == "cuda":
            self._settle()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(way, micro)
            return (torch.cuda.max_memory_allocated() - before) / 1e6
        kept: dict[int, int] = {parameter.data_ptr(): 0 for parameter in self.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.step(way, micro)
        return sum(kept.values()) / 1e6

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(bench: Bench, case: Case, report: Report, repeats: int, ways: Sequence[str]) -> None:
    """One row a measure, against flat; time also against padded."""
    micros = {way: bench.micro(way, case) for way in ways}
    values = [bench.step(way, micro) for way, micro in micros.items()]  # warms up, too
    if max(values) - min(values) > (1e-5 if bench.device.type == "cpu" else 2e-2) * abs(values[0]):
        raise RuntimeError(f"{case}: the sides disagree: {dict(zip(ways, values, strict=True))}")
    taken = interleave([bench.seconds(way, micro) for way, micro in micros.items()], repeats)
    seconds = dict(zip(ways, taken, strict=True))
    goal = GOAL if case.fraction == GOAL_AT and case.size == 8 else None
    tokens = {way: float(len(micro.layout.tokens_P)) for way, micro in micros.items()}
    report.add(f"tokens, {case}", tokens["tree"], tokens["flat"], unit="tokens", less_is_better=True)
    report.add(f"time, {case}", seconds["tree"], seconds["flat"], unit="s", goal=goal, less_is_better=True)
    if "padded" in seconds:
        name = f"time against padded, {case}"
        report.add(name, seconds["tree"], seconds["padded"], unit="s", less_is_better=True)
    used = {way: bench.megabytes(way, micros[way]) for way in ("tree", "flat")}
    report.add(f"memory, {case}", used["tree"], used["flat"], unit="MB", less_is_better=True)


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument("--shape", help="of the model: small, tiny, 0.6b, 1.7b; default small on the CPU, 0.6b on a GPU")
    made.add_argument("--length", type=int, help="tokens of a row; default 512 on the CPU, 4096 on a GPU")
    made.add_argument("--groups", type=int, help="groups in a step; default 1 on the CPU, 2 on a GPU, to fill it")
    return made.parse_args()


def main() -> None:
    arguments = read_arguments()
    on_gpu = arguments.device.startswith("cuda")
    length = arguments.length or (4096 if on_gpu else 512)
    groups = arguments.groups or (2 if on_gpu else 1)
    repeats = 3 if arguments.quick else 7
    lengths = [length] if arguments.quick else [length // 2, length, length * 2, length * 4]
    bench = Bench(arguments.shape or ("0.6b" if on_gpu else "small"), torch.device(arguments.device), lengths[-1])
    report = Report("tree")
    for fraction in FRACTIONS:
        case = Case(fraction, length, 8, groups)
        compare(bench, case, report, repeats, ("tree", "flat", "padded"))
    if not arguments.quick:
        compare(bench, Case(GOAL_AT, length, 16, groups), report, repeats, ("tree", "flat"))
    for other in lengths:
        if other != length:
            compare(bench, Case(GOAL_AT, other, 8, groups), report, max(repeats // 2, 1), ("tree", "flat"))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
