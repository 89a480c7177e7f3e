"""Every algorithm by its definition, one row and one token at a time, for comparison with the flat code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rillflow.trainer.batches import Rows

NORM_TOKENS = 16
# The options of a recipe beside the algorithm's name.
SETTINGS: dict[str, dict[str, object]] = {"dr_grpo": {"norm_tokens": NORM_TOKENS}}


@dataclass
class Played:
    """A row: log-probs of its trained tokens, new ones with gradient, old ones as numbers, and its advantage."""

    new: list[torch.Tensor]
    old: list[float]
    advantage: float


def played(model: torch.nn.Module, rows: Rows, advantages: Callable[[Rows], list[float]]) -> list[Played]:
    found = []
    for start, length, advantage in zip(rows.start_R, rows.length_R, advantages(rows), strict=True):
        ids = torch.from_numpy(rows.tokens_N[start : start + length].astype(np.int64))
        log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        trained = [t for t in range(1, int(length)) if rows.mask_N[start + t]]
        new = [log_probs[t - 1, ids[t]] for t in trained]
        found.append(Played(new, [float(rows.old_N[start + t]) for t in trained], advantage))
    return found


# ---------------------------------------------------------------- advantages


def grpo(rows: Rows) -> list[float]:
    n = rows.group_size_R
    std = rows.group_std_R * np.sqrt(n / (n - 1))
    return list((rows.reward_R - rows.group_mean_R) / (std + 1e-6))


def dr_grpo(rows: Rows) -> list[float]:
    return list(rows.reward_R - rows.group_mean_R)


def rloo(rows: Rows) -> list[float]:
    n, s, m = rows.group_size_R, rows.reward_R, rows.group_mean_R
    return list(s - (n * m - s) / (n - 1))


def white(score: np.ndarray, rows: Rows) -> list[float]:
    each = np.repeat(score, rows.trained_R)
    return list((score - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8))


# ---------------------------------------------------------------- losses of one token


def clipped(
    new: torch.Tensor, old: float, a: float, *, low: float, high: float, dual: float = math.inf
) -> torch.Tensor:
    r = torch.exp(new - old)
    loss = torch.max(-a * r, -a * torch.clamp(r, 1 - low, 1 + high))
    return torch.clamp(loss, max=-a * dual) if a < 0 else loss


def tokenwise(rows: list[Played], of: Callable[[torch.Tensor, float, float], torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.stack([of(new, old, row.advantage) for new, old in zip(row.new, row.old, strict=True)]) for row in rows
    ]


def gspo(rows: list[Played]) -> list[torch.Tensor]:
    """By the paper: the ratio of the row, once, for all its tokens."""
    found = []
    for row in rows:
        mean = torch.stack(row.new).mean() - sum(row.old) / len(row.old)
        one = clipped(mean, 0.0, row.advantage, low=3e-4, high=4e-4)
        found.append(one.expand(len(row.old)))
    return found


def sapo(new: torch.Tensor, old: float, a: float) -> torch.Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + torch.exp(-tau * (torch.exp(new - old) - 1)))


def m2po(rows: list[Played]) -> list[torch.Tensor]:
    flat = [(n.item() - o, row.advantage) for row in rows for n, o in zip(row.new, row.old, strict=True)]
    moments = sorted((d * d for d, a in flat if d * a > 0), reverse=True)
    low, high = 0.95, 20.0
    if moments and np.mean(moments) > 0.01:
        k = next((k for k in range(len(moments)) if np.mean(moments[k:]) < 0.01), len(moments) - 1)
        tau = math.sqrt(moments[k])
        low, high = min(1 - math.exp(-tau), low), min(math.exp(tau) - 1, high)
    return tokenwise(rows, lambda n, o, a: clipped(n, o, a, low=low, high=high))


def reinforce(new: torch.Tensor, old: float, a: float) -> torch.Tensor:
    return -a * new * min(math.exp(new.item() - old), 2.0)


def decoupled(new: torch.Tensor, old: float, a: float) -> torch.Tensor:
    weight = math.exp(new.item() - old)
    return -a * torch.exp(new - new.item()) * (weight if weight <= 5.0 else 0.0)


def cispo(new: torch.Tensor, old: float, a: float) -> torch.Tensor:
    return -min(math.exp(new.item() - old), 1.2) * a * new


# ---------------------------------------------------------------- whole algorithms


def token_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(losses).mean()


def row_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def sum_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.sum() for loss in losses]).mean()


def ppo(low: float, high: float, dual: float) -> Callable[[list[Played]], list[torch.Tensor]]:
    return lambda rows: tokenwise(rows, lambda n, o, a: clipped(n, o, a, low=low, high=high, dual=dual))


DEFINITIONS = {
    "grpo": (grpo, ppo(0.2, 0.2, 3), row_mean),
    "dr_grpo": (dr_grpo, ppo(0.2, 0.2, 3), lambda losses: sum_mean(losses) / NORM_TOKENS),
    "dapo": (grpo, ppo(0.2, 0.28, 10), token_mean),
    "gspo": (grpo, gspo, row_mean),
    "cispo": (grpo, lambda rows: tokenwise(rows, cispo), token_mean),
    "sapo": (grpo, lambda rows: tokenwise(rows, sapo), row_mean),
    "m2po": (grpo, m2po, token_mean),
    "rloo": (rloo, ppo(0.2, 0.2, 3), token_mean),
    "reinforce_plus_plus": (lambda rows: white(rows.reward_R, rows), ppo(0.2, 0.2, 3), token_mean),
    "reinforce_plus_plus_baseline": (
        lambda rows: white(rows.reward_R - rows.group_mean_R, rows), ppo(0.2, 0.2, 3), token_mean,
    ),
    "reinforce": (rloo, lambda rows: tokenwise(rows, reinforce), sum_mean),
    "decoupled_ppo": (grpo, lambda rows: tokenwise(rows, decoupled), token_mean),
}  # fmt: skip


def written_out(model: torch.nn.Module, rows: Rows, name: str) -> torch.Tensor:
    """The whole loss of a batch."""
    advantages, losses, mean = DEFINITIONS[name]
    return mean(losses(played(model, rows, advantages)))
