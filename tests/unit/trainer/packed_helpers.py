"""Rows that share prefixes, and what a model makes of each of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from trainer_helpers import VOCAB, random_rows
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rillflow.trainer.batches import Rows
from rillflow.trainer.packing import MicroBatch

CPU = torch.device("cpu")


def rows_of(tokens: list[list[int]], mask: list[list[int]] | None = None) -> Rows:
    """Rows of these tokens; without a mask all tokens but the first are trained."""
    masks = mask or [[0] + [1] * (len(row) - 1) for row in tokens]
    length_R = np.array([len(row) for row in tokens], dtype=np.int64)
    count, total = len(tokens), int(length_R.sum())
    some = random_rows(0, groups=1, size=1)
    return replace(
        some,
        tokens_N=np.concatenate([np.array(row, dtype=np.int32) for row in tokens]),
        mask_N=np.concatenate([np.array(row, dtype=bool) for row in masks]),
        old_N=np.linspace(-3, -1, total, dtype=np.float32),
        temperature_N=np.linspace(0.5, 1.5, total, dtype=np.float32),
        fresh_N=np.zeros(total, np.bool_),
        start_R=np.cumsum(length_R) - length_R,
        length_R=length_R,
        step_reward_N=np.full(total, np.nan, dtype=np.float32),
        **{
            name: np.resize(column, count)
            for name, column in vars(some).items()
            if name.endswith("_R") and name not in {"start_R", "length_R"}
        },
    )


def branching(seed: int, rows: int = 12, longest: int = 90, *, fanout: float = 0.7, trained: float = 0.5) -> Rows:
    """Rows of which most go on from somewhere in another one; trained tokens may be in what they share."""
    rng = np.random.default_rng(seed)
    made: list[list[int]] = []
    for _ in range(rows):
        length = int(rng.integers(2, longest // 2))
        row = rng.integers(0, VOCAB, length).tolist()
        if made and rng.random() < fanout:
            other = made[int(rng.integers(len(made)))]
            kept = int(rng.integers(len(other) // 2, len(other) + 1))
            row = (other[:kept] + row)[:longest]
        made.append(row if len(row) > 1 else [*row, 0])
    order = rng.permutation(len(made))
    masks = [[0, *(rng.random(len(made[r]) - 1) < trained).astype(int).tolist()] for r in order]
    return rows_of([made[r] for r in order], masks)


def grouped_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, head_dim: int = 8, window: int | None = None
) -> PreTrainedModel:
    """Four heads of queries on two of keys, three layers, of which the last two have the window."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=0.4,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config).eval().to(dtype)
    return exact_norms(model) if dtype is torch.float64 else model


def exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose norms compute in its own dtype: transformers' round to fp32, whatever it is."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(parent, name, _ExactNorm(norm))
    return model


class _ExactNorm(torch.nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: torch.Tensor = norm.weight
        self._eps: float = getattr(norm, "eps", None) or norm.variance_epsilon
        self._more = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0  # its weights are differences from 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, list(x.shape[-1:]), self.weight + self._more, self._eps)


def directions(rows: Rows, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The factors of the hidden states of trained tokens in the loss of these tests."""
    return torch.from_numpy(np.random.default_rng(7).normal(size=(len(rows.mask_N), size))).to(dtype)


def loss_alone(model: PreTrainedModel, rows: Rows, *, on: bool = False) -> torch.Tensor:
    """Every row for itself, by the model as it comes."""
    weight_ND = directions(rows, model.config.hidden_size, model.dtype)
    total = torch.zeros((), dtype=model.dtype)
    for start, length in zip(rows.start_R.tolist(), rows.length_R.tolist(), strict=True):
        ids = torch.from_numpy(rows.tokens_N[start : start + length].astype(np.int64))
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        at = np.flatnonzero(rows.mask_N[start : start + length])
        total = total + (hidden[at if on else at - 1] * weight_ND[start + at]).sum()
    return total


def loss_packed(hidden_PD: torch.Tensor, micro: MicroBatch, weight_ND: torch.Tensor) -> torch.Tensor:
    return (hidden_PD[micro.select_T] * weight_ND[micro.source_T]).sum()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
