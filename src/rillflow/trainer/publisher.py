"""Publishes versions: at once, or from a copy in memory while the next step computes.

Invariants: versions become visible in order, each whole or not at all; a version has the weights that were copied,
whatever is trained meanwhile; at most one copy exists, so a publication that has not ended delays the next one; the
error of a publication ends the trainer before its next commit; versions in use are not removed, and if those are
unknown, nothing is removed.

If the store writes deltas, the copy stays on the device of the weights, beside the store's copy of the version before.
The difference is found there: only changes leave a GPU, and every `snapshot_every` versions a whole version.
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
from rillflow.trainer.background import BackgroundWriter, HostCopy
from rillflow.weights import FolderStore
from rillflow.weights.codec import Adapter
from rillflow.weights.store import Publication

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe


log = logging.getLogger(__name__)


# The version of a LoRA policy's weights without an adapter.
BASE = 0


@dataclass(frozen=True)
class Retention:
    """The versions that stay in the store.

    The newest `keep` versions stay, and those that are `needed` by checkpoints or `wanted` by evaluations. For live
    nodes, which serve the versions `in_use`, all versions after the oldest of these stay, at most the newest `retain`.
    """

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


def nothing() -> None:
    """Do nothing."""


class Publisher(BackgroundWriter):
    """The only writer of a policy's weight store while it trains.

    `dtype` is that of the readers. `published` is called after every change of the store and must return at once.
    """

    def __init__(
        self,
        store: FolderStore,
        dtype: torch.dtype,
        retention: Retention | None = None,
        published: Callable[[], None] = nothing,
    ) -> None:
        super().__init__("the publication")
        self._store = store
        self._dtype = dtype
        self._retention = retention or Retention()
        self._published = published
        self._copy = HostCopy(stay=store.deltas)
        self._taken: _Taken | None = None
        self._last: Publication | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, weights: Tensors, probe: Probe | None = None) -> None:
        """Copy the weights of the next version, once the last publication has ended."""
        self._background.settle()
        self._taken = _Taken(self._copy.take(weights), None, probe)

    def take_adapter(self, adapter: Adapter, whole: Callable[[], Tensors], probe: Probe | None = None) -> None:
        """Copy an adapter, or the `whole` weights if the store has lost the adapter's base."""
        self._background.settle()
        if self.has_base:
            copied = self._copy.take(adapter.tensors)
            self._taken = _Taken(copied, Adapter(copied, adapter.rank, adapter.alpha), probe)
        else:
            self.take(whole(), probe)

    @cached_property
    def has_base(self) -> bool:
        """Return whether the store has the base of adapters. Checked once: only this writer changes the store."""
        try:
            dtypes = {tensor.dtype for tensor in self._store.pull(BASE).values() if tensor.is_floating_point()}
        except (CorruptData, WeightsError) as error:
            log.warning("publishing all weights instead of adapters: the adapters' base cannot be read: %s", error)
            return False
        return dtypes == {self._dtype} and self._store.adapter(BASE) is None

    def publish(self, version: int, parent: int) -> None:
        """Publish the copied weights; the version is durable and visible when this returns."""
        self.begin(version, parent)
        self.finish()

    def begin(self, version: int, parent: int) -> None:
        """Write the copied weights in the background."""
        assert self._taken is not None, "no weights were copied"
        self._background.start(partial(self._write, self._taken, version, parent))
        self._taken = None

    def _write(self, taken: _Taken, version: int, parent: int) -> None:
        with self._apart(taken.tensors.values()):
            if taken.adapter is not None:
                self._last = self._store.publish_adapter(taken.adapter, version, parent, BASE, taken.probe)
            else:
                self._last = self._store.publish(taken.tensors, version, parent, taken.probe)
        self._published()
        self.prune()

    @contextmanager
    def _apart(self, tensors: Collection[torch.Tensor]) -> Iterator[None]:
        """Use a separate CUDA stream, so that this thread's work does not queue behind the step's."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def statistics(self) -> dict[str, float]:
        """Return metrics of the last publication that has ended; the step after its own reports them."""
        last = self._last
        if last is None:
            return {}
        return {
            "weights_publish_seconds": last.seconds,
            "weights_delta_bytes": float(last.delta_bytes),
            "weights_full_bytes": float(last.full_bytes),
            "weights_changed": last.changed,
        }

    def prune(self) -> None:
        keeps = self._retention
        try:
            in_use, wanted = keeps.in_use(), keeps.wanted()
        except (RillflowError, TimeoutError) as error:
            log.warning("no versions are removed, because the versions in use are unknown: %s", error)
            return
        # Version 0 stays: a run whose checkpoints were removed starts there again, and it is the base of adapters.
        if self._store.prune(keeps.keep, {BASE, *keeps.needed(), *wanted}, in_use, keeps.retain):
            self._published()
