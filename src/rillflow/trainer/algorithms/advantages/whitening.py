"""Mean 0 and variance 1 over all trained tokens of a batch, whichever ranks hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.parallel.peers import Alone, Peers

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats

_VARIANCE_EPSILON = 1e-8
_STD_EPSILON = 1e-5


def whiten(value: Floats, *, peers: Peers = Alone()) -> Floats:
    """verl's: (x - mean) / sqrt(var + 1e-8), with the unbiased variance. Fewer than two tokens become 0."""
    total, mean, variance = _moments(value, peers)
    unbiased = variance * total / max(total - 1, 1)
    whitened: Floats = (value - mean) / np.sqrt(unbiased + _VARIANCE_EPSILON)
    return whitened


def standardise(value: Floats, *, peers: Peers = Alone()) -> Floats:
    """AstraFlow's: (x - mean) / (std + 1e-5), with the population's std."""
    _, mean, variance = _moments(value, peers)
    standardised: Floats = (value - mean) / (np.sqrt(variance) + _STD_EPSILON)
    return standardised


def _moments(value: Floats, peers: Peers) -> tuple[float, float, float]:
    """How many there are, their mean and the population's variance."""
    total, added = peers.total([float(len(value)), float(value.sum())])
    mean = added / max(total, 1.0)
    (squared,) = peers.total([float(((value - mean) ** 2).sum())])
    return total, mean, squared / max(total, 1.0)
