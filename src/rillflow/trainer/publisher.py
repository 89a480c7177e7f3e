"""Publishes versions: at once, or from a copy in memory while the next step computes.

Invariants: versions become visible in their order, each whole or not at all; the weights of a version are those that
were taken, whatever is trained meanwhile; there is one copy at most, so a publication that has not ended holds the next
one up; what a publication raises ends the trainer before its next commit. Nothing is removed that somebody may need:
when it cannot be learnt which versions nodes serve, nothing is removed at all.

Where the store writes deltas the copy stays on the device of the weights, beside the store's copy of the version
before: what has changed is found there, and only that, and now and then a whole version, leaves a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from rillflow.errors import CorruptData, RillflowError, WeightsError
from rillflow.trainer.background import Background, HostCopy
from rillflow.weights import FolderStore
from rillflow.weights.adapters import Adapter
from rillflow.weights.store import Publication

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe

log = logging.getLogger(__name__)

# A LoRA policy's weights without its adapter: what it began with.
BASE = 0


@dataclass(frozen=True)
class Retention:
    """What stays in the store: the newest `keep` versions, those that are `needed` here or `wanted` elsewhere, and for
    live nodes, which serve the versions `in_use`, all after the oldest of these, of the newest `retain`."""

    keep: int = 4
    retain: int = 64
    needed: Callable[[], Collection[int]] = tuple
    in_use: Callable[[], Collection[int]] = tuple
    wanted: Callable[[], Collection[int]] = tuple


@dataclass(frozen=True)
class _Taken:
    tensors: Tensors
    adapter: Adapter | None
    probe: Probe | None


def _nobody() -> None:
    """Nobody wants to hear of it."""


class Publisher:
    """The one writer of a policy's weight store while it trains. `dtype` is what its readers want; `published` is told
    of every change of the store, and must return at once."""

    def __init__(
        self,
        store: FolderStore,
        dtype: torch.dtype,
        retention: Retention | None = None,
        published: Callable[[], None] = _nobody,
    ) -> None:
        self._store = store
        self._dtype = dtype
        self._retention = retention or Retention()
        self._published = published
        self._copy = HostCopy(stay=store.deltas)
        self._background = Background("the publication")
        self._taken: _Taken | None = None
        self._last: Publication | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, weights: Tensors, probe: Probe | None = None) -> None:
        """Copy what the next version consists of, once the last publication has ended."""
        self._background.settle()
        self._taken = _Taken(self._copy.take(weights), None, probe)

    def take_adapter(self, adapter: Adapter, whole: Callable[[], Tensors], probe: Probe | None = None) -> None:
        """The same of an adapter; of the `whole` weights where the store has lost what the adapter belongs to."""
        self._background.settle()
        if self._has_base:
            copied = self._copy.take(adapter.tensors)
            self._taken = _Taken(copied, Adapter(copied, adapter.rank, adapter.alpha), probe)
        else:
            self.take(whole(), probe)

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
        with self._apart(taken.tensors):
            if taken.adapter is not None:
                self._last = self._store.publish_adapter(taken.adapter, version, parent, BASE, taken.probe)
            else:
                self._last = self._store.publish(taken.tensors, version, parent, taken.probe)
        self._published()
        self.prune()

    @contextmanager
    def _apart(self, tensors: Tensors) -> Iterator[None]:
        """What this thread computes on a GPU does not stand in line with the step that computes there."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if device is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def statistics(self) -> dict[str, float]:
        """Of the last publication that has ended; its step's successor shows them."""
        last = self._last
        if last is None:
            return {}
        return {
            "weights_publish_seconds": last.seconds,
            "weights_delta_bytes": float(last.delta_bytes),
            "weights_full_bytes": float(last.full_bytes),
            "weights_changed": last.changed,
        }

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
        keeps = self._retention
        try:
            in_use, wanted = keeps.in_use(), keeps.wanted()
        except (RillflowError, TimeoutError) as error:
            log.warning("no versions are removed: it is not known which ones are in use: %s", error)
            return
        # Version 0 stays: a run whose checkpoints were removed begins there again, and adapters belong to it.
        if self._store.prune(keeps.keep, {BASE, *keeps.needed(), *wanted}, in_use, keeps.retain):
            self._published()
