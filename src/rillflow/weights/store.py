"""The weight store of one policy: a folder of immutable, hashed versions and a head that names the live one.

    v00000012/model.safetensors, manifest.json      sealed: whole or absent, never changed
    v00000013/delta.rfd, manifest.json              what turns version 12 into 13; at times it is whole too
    v00000014/adapter.safetensors, manifest.json    of a LoRA policy: the adapter alone, and which version it belongs to
    head.json                                       the line: head, orphans, and the files of every version

Invariants: a version number is used once, also after pruning; `head.json` changes only after the version it names is in
place, and names nothing that is being removed; `pull` returns whole versions that match the manifests, so readers need
not know about deltas and adapters; everything that a kept version is built from is kept; a version is written again
only by `mend`, if it is damaged. The store has one writer (the policy's trainer) and any number of readers, which need
only the files.

A store with a key signs its manifests and lines, and does not check signatures: anyone who can write into this folder
can read the run's token beside it. Readers that get the files by other ways check them (`manifest`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from rillflow.errors import CorruptData, WeightsError
from rillflow.storage import write_atomic
from rillflow.weights import sealed
from rillflow.weights.codec import Adapter, encode, tensor_facts, unique
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import (
    DELTA,
    HEAD,
    AdapterFacts,
    Line,
    VersionManifest,
    as_hexadecimal,
    kept_versions,
    route,
    signed,
)

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe
    from rillflow.weights.delta_file import Part
    from rillflow.weights.manifest import TensorFacts
    from rillflow.weights.previous import Difference, Previous

log = logging.getLogger(__name__)

# A delta must be smaller than this share of the whole version.
WORTH = 0.8


class Publication(NamedTuple):
    """Measurements of a publication. `changed` is the share of the weights that the delta changes; 1 without a
    delta."""

    seconds: float
    delta_bytes: int
    full_bytes: int
    changed: float


def _always() -> bool:
    return True


class FolderStore(Folder):
    """The store that a trainer writes.

    With `deltas` it keeps a copy of the version that it published last. It then writes whole versions only at the
    beginning, every `snapshot_every` versions, if a delta would not be smaller, and until the delta encoder is `ready`.
    With `fingerprints` alone, the ranks of a sharded model make the deltas. Without either, versions have no
    fingerprints.
    """

    def __init__(
        self,
        folder: Path,
        key: bytes = b"",
        *,
        deltas: bool = False,
        fingerprints: bool = False,
        snapshot_every: int = 20,
        ready: Callable[[], bool] = _always,
    ) -> None:
        super().__init__(folder)
        self._key = key
        self._previous = _previous() if deltas else None
        self._fingerprints = deltas or fingerprints
        self._snapshot_every = snapshot_every
        self.ready = ready
        self.copying: Collection[int] = ()  # versions that are being copied elsewhere; they are not pruned

    @property
    def deltas(self) -> bool:
        """Return whether the store writes deltas."""
        return self._previous is not None

    @property
    def fingerprints(self) -> bool:
        """Return whether versions have fingerprints, which deltas need."""
        return self._fingerprints

    # ------------------------------------------------------------ writing

    def publish(self, tensors: Tensors, version: int, parent: int | None, probe: Probe | None = None) -> Publication:
        """Write a version and make it the head. `parent` is the head that it was trained from, None for a root. Engines
        have to reproduce `probe`."""
        self._check_new(version, parent)
        done = self._write(tensors, version, parent, probe=probe)
        self._move(version, self.line().orphaned)
        return done

    def publish_adapter(
        self, adapter: Adapter, version: int, parent: int | None, base: int, probe: Probe | None = None
    ) -> Publication:
        """Publish a version that is an adapter of `base`, a full version."""
        self._check_new(version, parent)
        if self.manifest(base).adapter is not None:
            raise WeightsError(f"version {base} is an adapter itself", "the base must be a version of all weights")
        facts = AdapterFacts(adapter.rank, adapter.alpha, base)
        done = self._write(adapter.tensors, version, parent, facts, probe)
        self._move(version, self.line().orphaned)
        return done

    def mend(self, tensors: Tensors, version: int, probe: Probe | None = None) -> bool:
        """Write `version` again if it is missing, damaged or has other tensors; return whether it was written.

        A trainer that restarts at `version` calls this: nodes must be able to pull it, with the probe of this trainer.
        The next delta starts from it.
        """
        try:
            pulled = self.pull(version)
            if _facts(pulled) == _facts(tensors):
                self._hold(pulled, version)
                self._replace(msgspec.structs.replace(self.manifest(version), probe=probe))
                return False
        except (CorruptData, WeightsError) as error:
            log.warning("writing version %d again: %s", version, error)
        if self.path(version).exists():
            sealed.remove(self.path(version))
        self._write(tensors, version, parent=None, probe=probe)
        self._tell_rewritten(version)
        return True

    def has(
        self, version: int, tensors: Mapping[str, TensorFacts], aliases: Mapping[str, str], probe: Probe | None
    ) -> bool:
        """Return whether `version` has these tensors, and all that it is built from is undamaged. It then gets the
        probe."""
        try:
            manifest = self.manifest(version)
            if (manifest.tensors, manifest.aliases, manifest.adapter) != (tensors, aliases, None):
                return False
            self.verify(manifest)
        except (CorruptData, WeightsError) as error:
            log.warning("writing version %d again: %s", version, error)
            return False
        self._replace(msgspec.structs.replace(manifest, probe=probe))
        return True

    def _tell_rewritten(self, version: int) -> None:
        line = self.line()
        if line.head is not None:
            self._move(line.head, line.orphaned, rewritten={version})

    def _hold(self, tensors: Tensors, version: int) -> None:
        """Keep tensors that were read back, as the base of the next delta."""
        if self._previous is not None:
            single, aliases = unique(tensors)
            self._previous.hold(_parts(single), aliases, version, self._sums(single))

    def _sums(self, tensors: Tensors) -> dict[Part, int]:
        """Return the fingerprints of these tensors."""
        from rillflow.weights.previous import sums_of

        compiled = self.ready()
        return sums_of(_parts(tensors), compiled=compiled)

    def _write(
        self,
        tensors: Tensors,
        version: int,
        parent: int | None,
        adapter: AdapterFacts | None = None,
        probe: Probe | None = None,
    ) -> Publication:
        started = time.perf_counter()
        single, aliases = unique(tensors)
        found = None if adapter is not None else self._difference(single, aliases, parent)
        sums: dict[Part, int] = {}
        if found is not None:
            sums = found.sums
        elif adapter is None and self._fingerprints:
            sums = self._sums(single)
        manifest = VersionManifest(
            files={},
            version=version,
            parent=parent,
            created=time.time(),
            tensors={name: tensor_facts(tensor) for name, tensor in single.items()},
            aliases=aliases,
            adapter=adapter,
            delta_of=None if found is None else parent,
            fingerprints=as_hexadecimal({part.tensor: value for part, value in sums.items()}),
            probe=probe,
        )
        whole = found is None or parent is None or self.whole_is_due(parent)
        try:
            sealed.seal(
                self.path(version),
                _files(single, found, adapter, whole=whole),
                lambda files: self._signed(msgspec.structs.replace(manifest, files=files)),
            )
        except sealed.AlreadySealed as error:
            raise WeightsError(f"version {version} exists already", "version numbers are never used twice") from error
        if self._previous is not None and adapter is None:
            self._previous.hold(_parts(single), aliases, version, sums, () if found is None else found.runs)
        entry = self.manifest(version).entry
        share = 1.0 if found is None else found.changed / max(1, sum(t.numel() for t in single.values()))
        return Publication(time.perf_counter() - started, entry.delta_bytes, entry.full_bytes, share)

    def _difference(self, tensors: Tensors, aliases: Mapping[str, str], parent: int | None) -> Difference | None:
        """Return the difference from the parent if that is in memory, has the same tensors and saves bytes."""
        previous = self._previous
        if previous is None or parent is None or previous.version != parent or not self.ready():
            return None
        weights = _parts(tensors)
        if not previous.fits(weights, aliases):
            return None
        return previous.difference(weights, WORTH * sum(tensor.nbytes for tensor in tensors.values()))

    def _signed(self, manifest: VersionManifest) -> VersionManifest:
        return signed(manifest, self._key)

    def publish_filled(self, temporary: Path, manifest: VersionManifest) -> None:
        """Publish a version whose files several writers have written into `temporary`."""
        self._check_new(manifest.version, manifest.parent)
        sealed.close(temporary, self.path(manifest.version), self._signed(manifest))
        self._move(manifest.version, self.line().orphaned)

    def mend_filled(self, temporary: Path, manifest: VersionManifest) -> None:
        """Put such a version in the place of one that `has` did not find."""
        if self.path(manifest.version).exists():
            sealed.remove(self.path(manifest.version))
        sealed.close(temporary, self.path(manifest.version), self._signed(manifest))
        self._tell_rewritten(manifest.version)

    def whole_is_due(self, parent: int) -> bool:
        """Return whether the version after `parent` must be whole, after `snapshot_every` deltas."""
        try:
            deltas = route(self.line().entries, None, parent, "full").deltas
        except WeightsError:
            return True
        return len(deltas) + 1 >= self._snapshot_every

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again and orphan the versions after it; return the newly orphaned ones."""
        self.manifest(version)
        sealed.remove_leftovers(self._folder)
        line = self.line()
        if version in line.orphaned:
            raise WeightsError(f"version {version} is orphaned", "rewind to a version of the live lineage")
        known = {*self.versions(), version if line.head is None else line.head} - line.orphaned
        orphaned = sorted(number for number in known if number > version)
        self._sign_again()
        # A writer that was killed while it mended a version may have left a line without it.
        there = self.versions()
        if self._next_line(version, line.orphaned.union(orphaned), there) != line:
            self._move(version, line.orphaned.union(orphaned), rewritten=there)
        return orphaned

    def _sign_again(self) -> None:
        """Sign versions that were published with another key or none."""
        for version in self.versions() if self._key else []:
            with suppress(CorruptData):
                self._replace(self.manifest(version))

    def _replace(self, manifest: VersionManifest) -> None:
        """Replace the manifest of an existing version, signed, if it differs."""
        again = self._signed(manifest)
        if again != self.manifest(manifest.version):
            write_atomic(self.path(manifest.version) / sealed.MANIFEST, sealed.as_text(again))

    def prune(
        self, keep: int, protect: Collection[int] = (), in_use: Collection[int] = (), retain: int = 64
    ) -> list[int]:
        """Remove orphaned and old versions and return them.

        The head stays, and the newest `keep` versions, those in `protect`, those by which nodes on the versions
        `in_use` catch up (of the newest `retain`), those in `copying`, and all versions that these are built from.
        """
        line, there, protect = self.line(), self.versions(), {*protect, *self.copying}
        stays = kept_versions(line, there, self._bases(line), keep=keep, protect=protect, in_use=in_use, retain=retain)
        gone = [version for version in there if version not in stays]
        if gone and line.head is not None:
            self._move(line.head, line.orphaned, without=gone)
        for version in reversed(gone):  # a version is removed before the ones that it is built from
            sealed.remove(self.path(version))
        return gone

    def _bases(self, line: Line) -> dict[int, int]:
        """Return the bases of the versions that are adapters. Versions with a delta are not."""
        bases = {}
        for version in self.versions():
            if (entry := line.entries.get(version)) is not None and entry.delta_bytes:
                continue
            with suppress(CorruptData):
                if (adapter := self.manifest(version).adapter) is not None:
                    bases[version] = adapter.base
        return bases

    def _check_new(self, version: int, parent: int | None) -> None:
        highest = self.highest()
        if version <= highest or version < 0:
            raise WeightsError(
                f"version {version} cannot be published: the highest number used is {highest}",
                "version numbers are never used twice: use one above `highest()`",
            )
        if parent is not None and parent != self.head():
            raise WeightsError(
                f"version {version} comes from {parent}, but the head is {self.head()}",
                "another trainer has taken this policy over: stop this one",
            )

    def _move(
        self, head: int, orphaned: Collection[int], *, rewritten: Collection[int] = (), without: Collection[int] = ()
    ) -> None:
        write_atomic(self._folder / HEAD, sealed.as_text(self._next_line(head, orphaned, rewritten, without)))

    def _next_line(
        self, head: int, orphaned: Collection[int], rewritten: Collection[int] = (), without: Collection[int] = ()
    ) -> Line:
        """Return the next line. Entries of versions that were `rewritten` are read again; others stay."""
        known = {version: entry for version, entry in self.line().entries.items() if version not in rewritten}
        entries = {version: entry for version, entry in self._entries(known).items() if version not in without}
        return signed(Line(head=head, orphaned=frozenset(orphaned), entries=entries), self._key)


# Modules that compute on weights are imported lazily: their compiler takes long to load.


def _previous() -> Previous:
    from rillflow.weights.previous import Previous

    return Previous()


def _parts(tensors: Tensors) -> dict[Part, torch.Tensor]:
    from rillflow.weights.delta_file import Part

    return {Part(name, 0, tensor.numel()): tensor.detach().contiguous() for name, tensor in tensors.items()}


def _facts(tensors: Tensors) -> dict[str, object]:
    return {name: tensor_facts(tensor) for name, tensor in tensors.items()}


def _files(
    tensors: Tensors, found: Difference | None, adapter: AdapterFacts | None, *, whole: bool
) -> Iterator[tuple[str, sealed.Content]]:
    if found is not None:
        from rillflow.weights import delta_file

        yield f"{DELTA}.rfd", delta_file.write(found.pieces)
    if whole:
        yield from encode(tensors, "model" if adapter is None else "adapter")
