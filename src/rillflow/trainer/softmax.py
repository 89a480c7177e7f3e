"""The softmax over a vocabulary on a CPU, in fp32, by compiled loops: a row is read twice, while it is in the cache.

As operators of torch it is ten passes over all logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rillflow.trainer.exponential import exponential
from rillflow.weights.delta.jit import loosely

Array = npt.NDArray[Any]
_NONE = np.float32(0.0)


def summed(
    logits_TV: torch.Tensor, target_T: torch.Tensor, factor_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the softmax of each row times its factor: the log-prob of the target, the log of the partition sum, and the
    entropy."""
    found = torch.empty(3, len(logits_TV))
    _summed(*(part.detach().numpy() for part in (logits_TV, target_T, factor_T, *found)))
    logprob_T, total_T, entropy_T = found
    return logprob_T, total_T, entropy_T


def shared_(logits_TV: torch.Tensor, factor_T: torch.Tensor, total_T: torch.Tensor) -> torch.Tensor:
    """The probabilities, in place of the logits."""
    _shared(*(part.detach().numpy() for part in (logits_TV, factor_T, total_T)))
    return logits_TV


@loosely
def _summed(logits: Array, target: Array, factor: Array, logprob: Array, total: Array, entropy: Array) -> None:
    size = logits.shape[1]
    for t in range(len(logits)):
        row, times = logits[t], factor[t]
        most = row[0]
        for v in range(size):
            most = row[v] if row[v] > most else most  # what is no number makes the sum none
        most *= times
        sum, product = _NONE, _NONE
        for v in range(size):
            scaled = row[v] * times
            share = exponential(scaled - most)
            sum += share
            product += share * scaled
        total[t] = most + np.float32(math.log(sum))
        entropy[t] = total[t] - product / sum
        logprob[t] = row[target[t]] * times - total[t]


@loosely
def _shared(logits: Array, factor: Array, total: Array) -> None:
    for t in range(len(logits)):
        for v in range(logits.shape[1]):
            logits[t, v] = exponential(logits[t, v] * factor[t] - total[t])
