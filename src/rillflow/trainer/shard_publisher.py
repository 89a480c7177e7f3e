"""Publishes sharded models: every rank writes its own shards, rank 0 seals the version, and no rank gathers the model.

    .v00000013.….tmp/delta-00000.rfd, delta-00001.rfd, …      each rank's delta
                     .rows00001, …                            the shards of the other ranks, for a whole version

For a whole version rank 0 maps the files of rows, writes the tensors from them and removes them. Mapped rows need no
memory of the process.

Invariants: a version has exactly the bytes that one rank would publish of the same weights; all ranks write the same
kind of version, which rank 0 decides; it becomes visible once all ranks have reported their files. Shards on the host
are in memory once, beside the words in which the version differs from the one before (`weights.in_place`). On a GPU
they are there twice, because the difference is found there.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import torch

from rillflow.errors import CorruptData
from rillflow.trainer.background import DEADLINE, HostCopy, collect, hand_in
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.sharding import Shards
from rillflow.trainer.publisher import Publisher, Retention, nothing
from rillflow.weights import FolderStore, delta_file, sealed
from rillflow.weights.codec import Pieces, encode
from rillflow.weights.delta_file import Part
from rillflow.weights.in_place import InPlace
from rillflow.weights.manifest import DELTA, VersionManifest, as_hexadecimal
from rillflow.weights.previous import Difference, Parts, Previous, sums_of
from rillflow.weights.sealed import FileFacts
from rillflow.weights.store import Publication

if TYPE_CHECKING:
    from rillflow.types import Probe

_MODULUS = 1 << 64  # of fingerprints


class _Kind(msgspec.Struct, frozen=True):
    """Rank 0's decision on the kind of version; `writer` is part of the name of the folder that all write into."""

    delta: bool
    whole: bool
    writer: str


# Built here: msgspec crashes where several threads decode a type for the first time.
_KIND = msgspec.json.Decoder(_Kind)


class _Written(msgspec.Struct, frozen=True):
    """The files that a rank has written. `sums` are its parts' contributions to the fingerprints of the new tensors,
    `rows` the parts in its file of rows, in order."""

    files: dict[str, FileFacts]
    sums: dict[str, int]
    changed: int
    rows: list[Part]


@dataclass(frozen=True)
class _Taken:
    shards: Shards
    kind: _Kind
    probe: Probe | None


class _Content(NamedTuple):
    """A rank's share of a version: its parts, the difference in them if a delta is due, and their `sums`."""

    version: int
    parent: int | None
    parts: Parts
    found: Difference | None
    sums: Mapping[Part, int]

    @property
    def changed(self) -> int:
        return 0 if self.found is None else self.found.changed


class ShardPublisher(Publisher):
    """The publisher of a sharded model. Every rank has an instance and makes equal calls; only rank 0 calls `prune`.

    The store writes no deltas itself; the ranks do if it writes fingerprints. A version is whole if the one before is
    not known bit for bit, such as after a restart, and every `snapshot_every` versions.
    """

    def __init__(
        self,
        store: FolderStore,
        dtype: torch.dtype,
        peers: Peers,
        retention: Retention | None = None,
        published: Callable[[], None] = nothing,
        *,
        patience: float = DEADLINE / 2,
    ) -> None:
        super().__init__(store, dtype, retention, published)
        self._peers = peers
        self._patience = patience
        self._copies: _Copies | None = None
        self._taken_shards: _Taken | None = None

    def take_shards(self, shards: Shards, probe: Probe | None = None) -> None:
        """Copy this rank's shards of the next version, once the last publication has ended."""
        self._background.settle()
        if self._copies is None:
            on_gpu = any(tensor.is_cuda for tensor in shards.parts.values())
            self._copies = _OnDevice() if on_gpu else InPlace()
        kind = self._decided(self._copies.version)
        self._copies.take(shards.parts, self._dtype, keep=kind.delta)
        self._taken_shards = _Taken(shards._replace(parts={}), kind, probe)

    def _decided(self, base: int | None) -> _Kind:
        ready = not any(self._peers.highest([float(not self._store.ready())]))
        delta = self._store.fingerprints and ready and base is not None and base == self._store.head()
        whole = base is None or not delta or self._store.whole_is_due(base)
        mine = _Kind(delta, whole, uuid.uuid4().hex)
        return _KIND.decode(self._peers.first(msgspec.json.encode(mine)))

    def begin(self, version: int, parent: int | None) -> None:
        """Write this rank's shards in the background; rank 0 makes the version visible once all have."""
        taken, self._taken_shards = self._taken_shards, None
        assert taken is not None, "no shards were copied"
        assert self._copies is not None
        self._background.start(partial(self._write_all, taken, self._copies, version, parent))

    def _write_all(self, taken: _Taken, copies: _Copies, version: int, parent: int | None) -> None:
        started = time.perf_counter()
        parts = copies.parts
        with self._apart(parts.values()):
            found = copies.difference() if taken.kind.delta else None
            sums = self._sums(parts) if found is None else found.sums
            last = self._write_files(taken, _Content(version, parent, parts, found, sums))
            copies.hold(version, sums, () if found is None else found.runs)
        if last is not None:
            self._last = last._replace(seconds=time.perf_counter() - started)
            if parent is not None:  # at the start others look at the store first
                self._published()
                self.prune()

    def _sums(self, parts: Parts) -> dict[Part, int]:
        return sums_of(parts, compiled=self._store.ready()) if self._store.fingerprints else {}

    # ------------------------------------------------------------ files

    def _write_files(self, taken: _Taken, content: _Content) -> Publication | None:
        """Write this rank's part of the folder; rank 0 also seals it."""
        target, rank = self._store.path(content.version), self._peers.rank
        temporary = sealed.unfinished(target, taken.kind.writer)
        with sealed.cleaned(temporary, target):
            files = sealed.fill(temporary, _delta_files(content.found, rank))
            rows = _write_rows(_rows(temporary, rank), content.parts) if taken.kind.whole and rank else []
            sums = {part.tensor: value for part, value in content.sums.items()}
            written = _Written(files, sums, content.changed, rows)
            if rank > 0:
                hand_in(temporary, rank, written)
                return None
            return self._seal(temporary, taken, content, written)

    def _seal(self, temporary: Path, taken: _Taken, content: _Content, mine: _Written) -> Publication:
        others = {r: collect(temporary, r, _Written, self._patience) for r in range(1, self._peers.size)}
        files, sums, changed = dict(mine.files), Counter(mine.sums), mine.changed
        for other in others.values():
            files |= other.files
            sums.update(other.sums)
            changed += other.changed
        shards, delta = taken.shards, taken.kind.delta
        if taken.kind.whole:
            rows = {rank: other.rows for rank, other in others.items() if other.rows}
            files |= sealed.fill(temporary, encode(_joined(shards, content.parts, temporary, rows, self._dtype)))
            for rank in rows:
                _rows(temporary, rank).unlink()
        names = shards.tensors if self._store.fingerprints else ()
        manifest = VersionManifest(
            files=files,
            version=content.version,
            parent=content.parent,
            created=time.time(),
            tensors=shards.tensors,
            aliases=shards.aliases,
            delta_of=content.parent if delta else None,
            fingerprints=as_hexadecimal({name: sums[name] % _MODULUS for name in names}),
            probe=taken.probe,
        )
        if content.parent is None and content.version <= self._store.highest():
            self._store.mend_filled(temporary, manifest)
        else:
            self._store.publish_filled(temporary, manifest)
        entry = manifest.entry
        weights = sum(math.prod(facts.shape) for facts in shards.tensors.values())
        return Publication(0.0, entry.delta_bytes, entry.full_bytes, changed / max(1, weights) if delta else 1.0)


def _delta_files(found: Difference | None, rank: int) -> Iterator[tuple[str, sealed.Content]]:
    if found is not None:
        yield f"{DELTA}-{rank:05d}.rfd", delta_file.write(found.pieces)


def _rows(folder: Path, rank: int) -> Path:
    return folder / f".rows{rank:05d}"


def _write_rows(path: Path, parts: Parts) -> list[Part]:
    """Write these parts, one after the other; return them. Rank 0 removes the file, so it need not be durable."""
    with open(path, "xb") as file:
        for tensor in parts.values():
            file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return list(parts)


def _joined(
    shards: Shards, own: Parts, folder: Path, rows: Mapping[int, Sequence[Part]], dtype: torch.dtype
) -> dict[str, Pieces]:
    """Return all tensors of the model: this rank's parts and those in the other ranks' files."""
    parts = dict(own)
    for rank, theirs in rows.items():
        mapped = torch.from_file(
            str(_rows(folder, rank)), shared=False, size=sum(part.weights for part in theirs), dtype=dtype
        )
        parts |= zip(theirs, torch.split_with_sizes(mapped, [part.weights for part in theirs]), strict=True)
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in shards.tensors}
    for part in sorted(parts):
        pieces[part.tensor].append(parts[part])
    for name, facts in shards.tensors.items():
        if sum(map(len, pieces[name])) != math.prod(facts.shape):
            raise CorruptData(f"the ranks have not all rows of {name}", "start the trainer again, and report it")
    return {name: Pieces(dtype, facts.shape, pieces[name]) for name, facts in shards.tensors.items()}


# ---------------------------------------------------------------- copies of shards


class _Copies(Protocol):
    """This rank's parts of the version that was taken last, and what it takes to find the difference to the one before,
    which is `version`, or None if that is not known. `weights.in_place` has them on the host."""

    version: int | None

    def take(self, weights: Parts, dtype: torch.dtype, *, keep: bool) -> None: ...

    @property
    def parts(self) -> dict[Part, torch.Tensor]: ...

    def difference(self) -> Difference: ...

    def hold(self, version: int, sums: Mapping[Part, int], fingerprints: Sequence[int] = ()) -> None: ...


class _OnDevice:
    """Copies on a GPU: of the parts that were taken, and of the version before."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._copy = HostCopy(stay=True)
        self._previous = Previous()
        self.parts: dict[Part, torch.Tensor] = {}

    def take(self, weights: Parts, dtype: torch.dtype, *, keep: bool) -> None:
        copied = self._copy.take({part.tensor: tensor.reshape(-1) for part, tensor in weights.items()}, dtype)
        self.parts = {part: copied[part.tensor] for part in weights}

    def difference(self) -> Difference:
        found = self._previous.difference(self.parts, math.inf)
        assert found is not None, "a difference may have any size"
        return found

    def hold(self, version: int, sums: Mapping[Part, int], fingerprints: Sequence[int] = ()) -> None:
        self.version = None
        self._previous.hold(self.parts, {}, version, sums, fingerprints)
        self.version = version
