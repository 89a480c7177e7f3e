"""The softmax over a vocabulary, on a CPU in fp32: each row is read twice, while it is in the processor's cache.

torch's operators take ten passes over all logits. Axes: T tokens, V the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rillflow.kernels.compile import fastmath
from rillflow.kernels.exponential import exponential

Array = npt.NDArray[Any]
Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_ZERO = np.float32(0.0)


def stats(logits_TV: torch.Tensor, target_T: torch.Tensor, factor_T: torch.Tensor) -> Stats:
    """Return, of the softmax of each row times its factor: the log-prob of the target, the log of the partition sum,
    and the entropy."""
    found = torch.empty(3, len(logits_TV))
    stats_loop(*(part.detach().numpy() for part in (logits_TV, target_T, factor_T, *found)))
    logprob_T, total_T, entropy_T = found
    return logprob_T, total_T, entropy_T


def probabilities_(logits_TV: torch.Tensor, factor_T: torch.Tensor, total_T: torch.Tensor) -> torch.Tensor:
    """Return the probabilities, in place of the logits; `total_T` is the log of the partition sum."""
    probabilities_loop(*(part.detach().numpy() for part in (logits_TV, factor_T, total_T)))
    return logits_TV


# ------------------------------------------------------------ the reference


def reference_stats(logits_TV: torch.Tensor, target_T: torch.Tensor, factor_T: torch.Tensor) -> Stats:
    log_TV = (logits_TV * factor_T[:, None]).log_softmax(-1)
    logprob_T = log_TV.gather(-1, target_T[:, None])[:, 0]
    total_T = (logits_TV * factor_T[:, None]).logsumexp(-1)
    return logprob_T, total_T, -(log_TV.exp() * log_TV).sum(-1)


def reference_probabilities(logits_TV: torch.Tensor, factor_T: torch.Tensor, total_T: torch.Tensor) -> torch.Tensor:
    return (logits_TV * factor_T[:, None] - total_T[:, None]).exp()


# ------------------------------------------------------------ the loops


@fastmath
def stats_loop(logits: Array, target: Array, factor: Array, logprob: Array, total: Array, entropy: Array) -> None:
    size = logits.shape[1]
    for t in range(len(logits)):
        row, times = logits[t], factor[t]
        most = row[0]
        for v in range(size):
            most = row[v] if row[v] > most else most  # a NaN in the row makes the sum NaN
        most *= times
        sum, product = _ZERO, _ZERO
        for v in range(size):
            scaled = row[v] * times
            share = exponential(scaled - most)
            sum += share
            product += share * scaled
        total[t] = most + np.float32(math.log(sum))
        entropy[t] = total[t] - product / sum
        logprob[t] = row[target[t]] * times - total[t]


@fastmath
def probabilities_loop(logits: Array, factor: Array, total: Array) -> None:
    for t in range(len(logits)):
        for v in range(logits.shape[1]):
            logits[t, v] = exponential(logits[t, v] * factor[t] - total[t])
