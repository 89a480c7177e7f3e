"""Mean 0 and variance 1 over all trained tokens of a batch, whichever ranks hold them.

`count` says how many tokens share each value, where a whole row does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.parallel.peers import Alone, Peers

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints

_VARIANCE_EPSILON = 1e-8
_STD_EPSILON = 1e-5


def whiten(value: Floats, count: Ints | None = None, *, peers: Peers = Alone()) -> Floats:
    """verl's: (x - mean) / sqrt(var + 1e-8), with the unbiased variance. Fewer than two tokens become 0."""
    total, mean, variance = _moments(value, count, peers)
    unbiased = variance * total / max(total - 1, 1)
    whitened: Floats = (value - mean) / np.sqrt(unbiased + _VARIANCE_EPSILON)
    return whitened


def standardise(value: Floats, count: Ints | None = None, *, peers: Peers = Alone()) -> Floats:
    """AstraFlow's: (x - mean) / (std + 1e-5), with the population's std."""
    _, mean, variance = _moments(value, count, peers)
    standardised: Floats = (value - mean) / (np.sqrt(variance) + _STD_EPSILON)
    return standardised


def _moments(value: Floats, count: Ints | None, peers: Peers) -> tuple[float, float, float]:
    """How many there are, their mean and the population's variance."""
    weight = np.ones(len(value)) if count is None else count
    total, added = peers.total([float(weight.sum()), float((value * weight).sum())])
    mean = added / max(total, 1.0)
    (squared,) = peers.total([float(((value - mean) ** 2 * weight).sum())])
    return total, mean, squared / max(total, 1.0)
