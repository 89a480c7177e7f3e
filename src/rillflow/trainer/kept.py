"""The advantages and log-probs that a trainer reports for the episodes that its run keeps for people.

A sample is named by one number (`key_of`), so that it travels with its row through packing and between ranks. Values
stay on the device until the step ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.layout import MicroBatch
from rillflow.types import BatchSample, KeptTokens

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints

MOST_TOKENS = 1 << 18  # that one rank tells of a step
_BITS = 20  # of a task's place in its group, and of a sample's number in its task


def key_of(sample: BatchSample) -> int:
    """Return the number of a sample in its batch, above 0; 0 where it is too large for one."""
    _, place, number = sample.id.rsplit(".", 2)
    if max(int(place), int(number)) >> _BITS or sample.member >> _BITS:
        return 0
    return 1 + (sample.member << 2 * _BITS | int(place) << _BITS | int(number))


class Told:
    """The reported tokens of one step."""

    def __init__(self) -> None:
        self._seen: list[tuple[Ints, Ints, torch.Tensor]] = []
        self._tokens = 0

    @torch.no_grad()
    def add(self, micro: MicroBatch, advantage_T: torch.Tensor, logprob_T: torch.Tensor) -> None:
        """Take the values of the micro-batch's tokens that are of kept samples."""
        at = np.flatnonzero(micro.kept_T)
        if not len(at) or self._tokens + len(at) > MOST_TOKENS:
            return
        self._tokens += len(at)
        index = torch.from_numpy(at).to(advantage_T.device)
        values_2T = torch.stack([advantage_T[index].float(), logprob_T[index].float()])
        self._seen.append((micro.kept_T[at], micro.depth_T[at], values_2T))

    def values(self) -> list[KeptTokens]:
        """Return the reported values of each sample."""
        if not self._seen:
            return []
        key_T = np.concatenate([key for key, _, _ in self._seen])
        depth_T = np.concatenate([depth for _, depth, _ in self._seen])
        advantage_T, logprob_T = np.concatenate([values.cpu().numpy() for _, _, values in self._seen], axis=1)
        return [_told(key, key_T == key, depth_T, advantage_T, logprob_T) for key in np.unique(key_T).tolist()]


def _told(key: int, own_T: np.ndarray, depth_T: Ints, advantage_T: np.ndarray, logprob_T: np.ndarray) -> KeptTokens:
    name, low = key - 1, (1 << _BITS) - 1
    return KeptTokens(
        member=name >> 2 * _BITS,
        place=name >> _BITS & low,
        number=name & low,
        at=depth_T[own_T].astype("<i4").tobytes(),
        advantages=advantage_T[own_T].astype("<f4").tobytes(),
        logprobs=logprob_T[own_T].astype("<f4").tobytes(),
    )
