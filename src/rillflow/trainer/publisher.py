"""Publishes versions: at once, or from a copy in the host's memory while the next step computes.

Invariants: versions become visible in their order, each whole or not at all; the weights of a version are those that
were taken, whatever is trained meanwhile; there is one copy at most, so a publication that has not ended holds the next
one up; what a publication raises ends the trainer before its next commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from rillflow.errors import CorruptData, WeightsError
from rillflow.trainer.background import Background, HostCopy
from rillflow.weights import FolderStore
from rillflow.weights.adapters import Adapter

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

# Versions that stay pullable for nodes that lag, besides those that checkpoints need.
KEEP_VERSIONS = 4
# A LoRA policy's weights without its adapter: what it began with.
BASE = 0


@dataclass(frozen=True)
class _Taken:
    tensors: Tensors
    adapter: Adapter | None


class Publisher:
    """The one writer of a policy's weight store while it trains. `needed` are versions that must stay in it; `dtype`
    is what its readers want."""

    def __init__(self, store: FolderStore, dtype: torch.dtype, needed: Callable[[], Collection[int]]) -> None:
        self._store = store
        self._dtype = dtype
        self._needed = needed
        self._copy = HostCopy()
        self._background = Background("the publication")
        self._taken: _Taken | None = None

    def take(self, weights: Tensors) -> None:
        """Copy what the next version consists of, once the last publication has ended."""
        self._background.settle()
        self._taken = _Taken(self._copy.take(weights), None)

    def take_adapter(self, adapter: Adapter, whole: Callable[[], Tensors]) -> None:
        """The same of an adapter; of the `whole` weights where the store has lost what the adapter belongs to."""
        self._background.settle()
        if self._has_base:
            copied = self._copy.take(adapter.tensors)
            self._taken = _Taken(copied, Adapter(copied, adapter.rank, adapter.alpha))
        else:
            self.take(whole())

    @cached_property
    def _has_base(self) -> bool:
        """Looked at once: nobody but this writer changes the store."""
        try:
            dtypes = {tensor.dtype for tensor in self._store.pull(BASE).values() if tensor.is_floating_point()}
        except (CorruptData, WeightsError) as error:
            log.warning("all weights are published instead of adapters: their base is not to be had: %s", error)
            return False
        return dtypes == {self._dtype} and self._store.adapter(BASE) is None

    def publish(self, version: int, parent: int) -> None:
        """Durable and visible when this returns."""
        self.begin(version, parent)
        self.finish()

    def begin(self, version: int, parent: int) -> None:
        """Write what was taken while the caller goes on."""
        assert self._taken is not None, "nothing was taken"
        self._background.start(partial(self._write, self._taken, version, parent))
        self._taken = None

    def _write(self, taken: _Taken, version: int, parent: int) -> None:
        if taken.adapter is not None:
            self._store.publish_adapter(taken.adapter, version, parent, BASE)
        else:
            self._store.publish(taken.tensors, version, parent)
        self.prune()

    def check(self) -> None:
        """Raise what has gone wrong while writing."""
        self._background.check()

    def finish(self) -> None:
        """Returns once the last publication is visible."""
        self._background.settle()

    def close(self) -> None:
        """For who ends because of something else."""
        self._background.close()

    def prune(self) -> None:
        # Version 0 stays: a run whose checkpoints were removed begins there again, and adapters belong to it.
        self._store.prune(KEEP_VERSIONS, protect={BASE, *self._needed()})
