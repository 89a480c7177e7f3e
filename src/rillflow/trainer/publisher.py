"""Publishes versions: at once, or from a copy in memory while the next step computes.

Invariants: versions become visible in order, each whole or not at all; a version has the weights that were copied,
whatever is trained meanwhile; at most one copy exists, so a publication that has not ended delays the next one; the
error of a publication ends the trainer before its next commit; versions in use are not removed, and if those are
unknown, nothing is removed; a sharded model publishes exactly what one rank would.

If the store writes deltas, the copy stays on the device of the weights, beside the store's copy of the version before.
The difference is found there: only changes leave a GPU, and every `snapshot_every` versions a whole version.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.errors import CorruptData, RillflowError, WeightsError
from rillflow.trainer.background import DEADLINE, BackgroundWriter, HostCopy, collect, hand_in
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.sharding import Shards
from rillflow.weights import FolderStore, delta_file, sealed
from rillflow.weights.codec import Adapter, encode, unique
from rillflow.weights.manifest import DELTA, VersionManifest, as_hexadecimal
from rillflow.weights.previous import Difference, Previous, sums_of
from rillflow.weights.sealed import FileFacts
from rillflow.weights.store import Publication

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe
    from rillflow.weights.delta_file import Part


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


def _nothing() -> None:
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
        published: Callable[[], None] = _nothing,
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
        with self._apart(taken.tensors):
            if taken.adapter is not None:
                self._last = self._store.publish_adapter(taken.adapter, version, parent, BASE, taken.probe)
            else:
                self._last = self._store.publish(taken.tensors, version, parent, taken.probe)
        self._published()
        self.prune()

    @contextmanager
    def _apart(self, tensors: Tensors) -> Iterator[None]:
        """Use a separate CUDA stream, so that this thread's work does not queue behind the step's."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
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


# ---------------------------------------------------------------- of sharded models


_MODULUS = 1 << 64  # of fingerprints


class _Kind(msgspec.Struct, frozen=True):
    """Rank 0's decision on the kind of version; `writer` is part of the name of the folder that all write into."""

    delta: bool
    whole: bool
    writer: str


# Built here: msgspec crashes where several threads decode a type for the first time.
_KIND = msgspec.json.Decoder(_Kind)


class _Written(msgspec.Struct, frozen=True):
    """The files that a rank has written. `sums` are its parts' contributions to the fingerprints of the new tensors."""

    files: dict[str, FileFacts]
    sums: dict[str, int]
    changed: int


@dataclass(frozen=True)
class _TakenShards:
    shards: Shards
    whole: Tensors  # on rank 0, if a whole version is due
    kind: _Kind
    probe: Probe | None


class ShardPublisher(Publisher):
    """The publisher of a sharded model: every rank writes the delta of its own shards, rank 0 seals the version.

        .v00000013.….tmp/delta-00000.rfd, delta-00001.rfd, …      until all ranks have reported their files

    Every rank has an instance and makes equal calls; only rank 0 calls `prune`. The store writes fingerprints, and no
    deltas itself. A rank needs no more memory for a delta than two copies of its shards. All ranks write the same kind
    of version, which rank 0 decides. Whole versions are gathered tensor by tensor: the first one after a start, and one
    every `snapshot_every` versions.
    """

    def __init__(
        self,
        store: FolderStore,
        dtype: torch.dtype,
        peers: Peers,
        retention: Retention | None = None,
        published: Callable[[], None] = lambda: None,
        *,
        patience: float = DEADLINE / 2,
    ) -> None:
        super().__init__(store, dtype, retention, published)
        self._peers = peers
        self._patience = patience
        self._previous = Previous()
        self._shards = HostCopy(stay=True)
        self._taken_shards: _TakenShards | None = None

    def take_shards(self, shards: Shards, whole: Callable[[], Tensors], probe: Probe | None = None) -> None:
        """Copy this rank's shards of the next version, and gather the `whole` weights if a whole version is due."""
        self._background.settle()
        kind = self._decided()
        copied = self._shards.take({part.tensor: tensor for part, tensor in shards.parts.items()})
        parts = {part: copied[part.tensor] for part in shards.parts}
        gathered = whole() if kind.whole else {}  # new tensors: the next step does not change them
        kept = gathered if self._peers.rank == 0 else {}
        self._taken_shards = _TakenShards(shards._replace(parts=parts), kept, kind, probe)

    def _decided(self) -> _Kind:
        base = self._previous.version
        ready = not any(self._peers.highest([float(not self._store.ready())]))
        delta = ready and base is not None and base == self._store.head()
        whole = base is None or not delta or self._store.whole_is_due(base)
        mine = _Kind(delta, whole, uuid.uuid4().hex)
        return _KIND.decode(self._peers.first(msgspec.json.encode(mine)))

    def begin(self, version: int, parent: int) -> None:
        """Write this rank's shards in the background; rank 0 makes the version visible once all have."""
        taken, self._taken_shards = self._taken_shards, None
        assert taken is not None, "no shards were copied"
        self._background.start(partial(self._write_all, taken, version, parent))

    def _write_all(self, taken: _TakenShards, version: int, parent: int) -> None:
        started = time.perf_counter()
        parts, aliases = taken.shards.parts, taken.shards.aliases
        with self._apart({part.tensor: tensor for part, tensor in parts.items()}):
            found = self._previous.difference(parts, math.inf) if taken.kind.delta else None
            sums = self._sums(parts) if found is None else found.sums
            if found is not None:
                mine = {part.tensor: value for part, value in sums.items()}
                last = self._write_delta(taken, found, mine, version, parent)
            elif self._peers.rank == 0:
                last = self._store.publish(taken.whole, version, parent, taken.probe)
            else:
                last = None
            self._previous.hold(parts, aliases, version, sums, () if found is None else found.runs)
        if last is not None:
            self._last = last._replace(seconds=time.perf_counter() - started)
            self._published()
            self.prune()

    def _sums(self, parts: Mapping[Part, torch.Tensor]) -> dict[Part, int]:
        return sums_of(parts, compiled=self._store.ready())

    def _write_delta(
        self, taken: _TakenShards, found: Difference, sums: dict[str, int], version: int, parent: int
    ) -> Publication | None:
        """Write this rank's part of the folder; rank 0 also seals it."""
        target, rank = self._store.path(version), self._peers.rank
        temporary = sealed.unfinished(target, taken.kind.writer)
        with sealed.cleaned(temporary, target):
            files = sealed.fill(temporary, [(f"{DELTA}-{rank:05d}.rfd", delta_file.write(found.pieces))])
            written = _Written(files, sums, found.changed)
            if rank > 0:
                hand_in(temporary, rank, written)
                return None
            return self._seal(temporary, taken, written, version, parent)

    def _seal(self, temporary: Path, taken: _TakenShards, mine: _Written, version: int, parent: int) -> Publication:
        files, sums, changed = dict(mine.files), Counter(mine.sums), mine.changed
        if taken.kind.whole:
            files |= sealed.fill(temporary, encode(unique(taken.whole)[0]))
        for rank in range(1, self._peers.size):
            other = collect(temporary, rank, _Written, self._patience)
            files |= other.files
            sums.update(other.sums)
            changed += other.changed
        shards = taken.shards
        manifest = VersionManifest(
            files=files,
            version=version,
            parent=parent,
            created=time.time(),
            tensors=shards.tensors,
            aliases=shards.aliases,
            delta_of=parent,
            fingerprints=as_hexadecimal({name: sums[name] % _MODULUS for name in shards.tensors}),
            probe=taken.probe,
        )
        self._store.publish_filled(temporary, manifest)
        weights = sum(math.prod(facts.shape) for facts in shards.tensors.values())
        entry = manifest.entry
        return Publication(0.0, entry.delta_bytes, entry.full_bytes, changed / max(1, weights))
