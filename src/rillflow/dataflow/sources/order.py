"""The endless sequence of epochs over one source's prompts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.sources.rows import Rows
from rillflow.types import Prompt


class InOrder:
    """The prompts as they stand, epoch after epoch."""

    def __init__(self, prompts: Rows) -> None:
        self._prompts = prompts

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


class Shuffled:
    """A new order every epoch, fixed by the seed."""

    def __init__(self, prompts: Rows, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._permutation)

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        return self._prompts[int(self._order(epoch)[place])]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState's stream is frozen: another numpy gives the same order.
        generator = np.random.RandomState(derive_seed(self._seed, "order", epoch) & 0xFFFFFFFF)
        return generator.permutation(len(self._prompts)).astype(np.int64, copy=False)
