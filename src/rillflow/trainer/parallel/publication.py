"""Publication of a model whose weights lie in shards: every rank writes the delta of its own, rank 0 seals the version.

    .v00000013.….tmp/delta-00000.rfd, delta-00001.rfd, …      until all ranks have handed in what they have written

Invariants: no rank needs more memory for a delta than two copies of its own shards; all ranks take the same kind of
version, which rank 0 decides; what is published is bit for bit what one rank would publish. Whole versions are still
gathered, tensor by tensor: the first one after a start, and one now and then.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.trainer.background import DEADLINE, HostCopy
from rillflow.trainer.parallel.handing import collect, hand_in
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.parallel.sharding import Shards
from rillflow.trainer.publisher import Publisher, Retention
from rillflow.weights import FolderStore, sealed
from rillflow.weights.codec import encode, unique
from rillflow.weights.delta import container
from rillflow.weights.manifest import DELTA, VersionManifest, as_hexadecimal
from rillflow.weights.previous import Difference, Previous, sums_of
from rillflow.weights.sealed import FileFacts
from rillflow.weights.store import Publication

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe
    from rillflow.weights.delta.container import Part

_MODULUS = 1 << 64  # of fingerprints


class _Kind(msgspec.Struct, frozen=True):
    """What rank 0 has decided; `writer` makes the name of the folder that all write into."""

    delta: bool
    whole: bool
    writer: str


# Built here: msgspec crashes where several threads decode a type for the first time.
_KIND = msgspec.json.Decoder(_Kind)


class _Written(msgspec.Struct, frozen=True):
    """What a rank has written. `sums` are what its parts add to the fingerprints of the new tensors."""

    files: dict[str, FileFacts]
    sums: dict[str, int]
    changed: int


@dataclass(frozen=True)
class _Taken:
    shards: Shards
    whole: Tensors  # on rank 0, where a whole version is due
    kind: _Kind
    probe: Probe | None


class ShardPublisher(Publisher):
    """Every rank has one and calls the same, but for `prune`, which rank 0 calls. Its store writes fingerprints, and no
    deltas itself."""

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
        self._taken_shards: _Taken | None = None

    def take_shards(self, shards: Shards, whole: Callable[[], Tensors], probe: Probe | None = None) -> None:
        """Copy this rank's shards of what the next version consists of, and gather the `whole` where it is due."""
        self._background.settle()
        kind = self._decided()
        copied = self._shards.take({part.tensor: tensor for part, tensor in shards.parts.items()})
        parts = {part: copied[part.tensor] for part in shards.parts}
        gathered = whole() if kind.whole else {}
        kept = self._copy.take(gathered) if self._peers.rank == 0 else {}
        self._taken_shards = _Taken(shards._replace(parts=parts), kept, kind, probe)

    def _decided(self) -> _Kind:
        base = self._previous.version
        ready = not any(self._peers.highest([float(not self._store.ready())]))
        delta = ready and base is not None and base == self._store.head()
        whole = base is None or not delta or self._store.whole_is_due(base)
        mine = _Kind(delta, whole, uuid.uuid4().hex)
        return _KIND.decode(self._peers.first(msgspec.json.encode(mine)))

    def begin(self, version: int, parent: int) -> None:
        """Every rank writes; rank 0 makes the version visible once all have."""
        taken, self._taken_shards = self._taken_shards, None
        assert taken is not None, "nothing was taken"
        self._background.start(partial(self._write_all, taken, version, parent))

    def _write_all(self, taken: _Taken, version: int, parent: int) -> None:
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
        self, taken: _Taken, found: Difference, sums: dict[str, int], version: int, parent: int
    ) -> Publication | None:
        """This rank's part of the folder; of rank 0 the rest too."""
        target, rank = self._store.path(version), self._peers.rank
        temporary = sealed.unfinished(target, taken.kind.writer)
        with sealed.cleaned(temporary, target):
            files = sealed.fill(temporary, [(f"{DELTA}-{rank:05d}.rfd", container.write(found.pieces))])
            written = _Written(files, sums, found.changed)
            if rank > 0:
                hand_in(temporary, rank, written)
                return None
            return self._seal(temporary, taken, written, version, parent)

    def _seal(self, temporary: Path, taken: _Taken, mine: _Written, version: int, parent: int) -> Publication:
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
