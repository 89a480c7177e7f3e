"""The weight store of one policy: a folder of immutable, hashed versions and a head that names the live one.

    v00000012/model.safetensors, manifest.json      sealed: whole or absent, never changed
    v00000013/delta.rfd, manifest.json              what turns version 12 into 13; at times it is whole too
    v00000014/adapter.safetensors, manifest.json    of a LoRA policy: the adapter alone, and which version it belongs to
    head.json                                       the line: head, orphans, and what there is of every version

Invariants: a version number is used once, also after pruning; `head.json` moves only after the version it names is in
place, and names nothing that is being removed; what `pull` returns matches the manifests, and is always whole: readers
need not know of deltas and adapters; whatever is kept, all that it is made of is kept; a version is written again only
by `mend`, when it is damaged. There is one writer (the policy's trainer) and any number of readers, which need nothing
but the files.

A store with a key signs what it writes, and does not check signatures: who can write into this folder can read the
run's token beside it. Those who get the files by other ways check them (`signing`).
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
from rillflow.weights import sealed, signing
from rillflow.weights.adapters import Adapter
from rillflow.weights.codec import encode, tensor_facts, unique
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import DELTA, HEAD, AdapterFacts, Line, VersionManifest, as_hexadecimal
from rillflow.weights.retention import kept
from rillflow.weights.route import route

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe
    from rillflow.weights.delta.container import Part
    from rillflow.weights.previous import Difference, Previous

log = logging.getLogger(__name__)

# A delta that is not smaller than this part of the whole version is not worth its decoding.
WORTH = 0.8


class Publication(NamedTuple):
    """What a publication took. `changed` is the part of the weights that the delta changes; without one it is 1."""

    seconds: float
    delta_bytes: int
    full_bytes: int
    changed: float


def _always() -> bool:
    return True


class FolderStore(Folder):
    """With `deltas` it keeps a copy of what it published last, and writes whole versions only at the beginning, every
    `snapshot_every` versions, where a delta would not help, and until what makes deltas is `ready`: nobody waits for
    that. With `fingerprints` others make the deltas. Without either, versions have no fingerprints: nobody needs them.
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
        self.copying: Collection[int] = ()  # versions that somebody copies elsewhere now: they stay meanwhile

    @property
    def deltas(self) -> bool:
        """Whether it writes any."""
        return self._previous is not None

    # ------------------------------------------------------------ writing

    def publish(self, tensors: Tensors, version: int, parent: int | None, probe: Probe | None = None) -> Publication:
        """Write a version and make it the head. `parent` is the head it was trained from; None for a root. `probe` is
        what engines have to reproduce of it."""
        self._check_new(version, parent)
        done = self._write(tensors, version, parent, probe=probe)
        self._move(version, self.line().orphaned)
        return done

    def publish_adapter(
        self, adapter: Adapter, version: int, parent: int | None, base: int, probe: Probe | None = None
    ) -> Publication:
        """The same for a version that is an adapter of `base`, a full one."""
        self._check_new(version, parent)
        if self.manifest(base).adapter is not None:
            raise WeightsError(f"version {base} is an adapter itself", "adapters belong to a version of all weights")
        facts = AdapterFacts(adapter.rank, adapter.alpha, base)
        done = self._write(adapter.tensors, version, parent, facts, probe)
        self._move(version, self.line().orphaned)
        return done

    def mend(self, tensors: Tensors, version: int, probe: Probe | None = None) -> bool:
        """Write `version` again if it is missing, damaged or of other tensors than these; whether it was.

        For a trainer that begins again at `version`: what nodes are to pull must be there, with the probe that this
        trainer has made of it. The next delta begins here.
        """
        try:
            pulled = self.pull(version)
            if _facts(pulled) == _facts(tensors):
                self._hold(pulled, version)
                self._replace(msgspec.structs.replace(self.manifest(version), probe=probe))
                return False
        except (CorruptData, WeightsError) as error:
            log.warning("version %d is written again: %s", version, error)
        if self.path(version).exists():
            sealed.remove(self.path(version))
        self._write(tensors, version, parent=None, probe=probe)
        line = self.line()
        if line.head is not None:
            self._move(line.head, line.orphaned, anew={version})
        return True

    def _hold(self, tensors: Tensors, version: int) -> None:
        """What was read back, as the base of the next delta."""
        if self._previous is not None:
            single, aliases = unique(tensors)
            self._previous.hold(_parts(single), aliases, version, self._sums(single))

    def _sums(self, tensors: Tensors) -> dict[Part, int]:
        """The fingerprints of these tensors."""
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
        """From the parent, if it is in memory, of the same tensors, and if that saves something."""
        previous = self._previous
        if previous is None or parent is None or previous.version != parent or not self.ready():
            return None
        weights = _parts(tensors)
        if not previous.fits(weights, aliases):
            return None
        return previous.difference(weights, WORTH * sum(tensor.nbytes for tensor in tensors.values()))

    def _signed(self, manifest: VersionManifest) -> VersionManifest:
        return signing.signed(manifest, self._key)

    def publish_filled(self, temporary: Path, manifest: VersionManifest) -> None:
        """The same for a version whose files were written into `temporary` by several writers."""
        self._check_new(manifest.version, manifest.parent)
        sealed.close(temporary, self.path(manifest.version), self._signed(manifest))
        self._move(manifest.version, self.line().orphaned)

    def whole_is_due(self, parent: int) -> bool:
        """Whether the version after `parent` is to be whole: there have been enough deltas since the last one."""
        try:
            deltas = route(self.line().entries, None, parent, "full").deltas
        except WeightsError:
            return True
        return len(deltas) + 1 >= self._snapshot_every

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again; versions after it are orphaned (returned: those that were not before)."""
        self.manifest(version)
        sealed.remove_leftovers(self._folder)
        line = self.line()
        if version in line.orphaned:
            raise WeightsError(f"version {version} is orphaned", "rewind to a version of the live line")
        known = {*self.versions(), version if line.head is None else line.head} - line.orphaned
        orphaned = sorted(number for number in known if number > version)
        self._sign_anew()
        # A writer that was killed while it mended a version may have left a line that does not know of it.
        there = self.versions()
        if self._next_line(version, line.orphaned.union(orphaned), there) != line:
            self._move(version, line.orphaned.union(orphaned), anew=there)
        return orphaned

    def _sign_anew(self) -> None:
        """Versions that were published with another key or none: this writer answers for them."""
        for version in self.versions() if self._key else []:
            with suppress(CorruptData):
                self._replace(self.manifest(version))

    def _replace(self, manifest: VersionManifest) -> None:
        """Write the manifest of a version that is there again, signed, where it differs."""
        again = self._signed(manifest)
        if again != self.manifest(manifest.version):
            write_atomic(self.path(manifest.version) / sealed.MANIFEST, sealed.as_text(again))

    def prune(
        self, keep: int, protect: Collection[int] = (), in_use: Collection[int] = (), retain: int = 64
    ) -> list[int]:
        """Remove orphaned and old versions, never the head, the newest `keep`, those in `protect`, those by which nodes
        on the versions `in_use` catch up (of the newest `retain`), those that somebody is `copying`, or what any of
        these needs. Returns what is gone."""
        line, there, protect = self.line(), self.versions(), {*protect, *self.copying}
        stays = kept(line, there, self._bases(line), keep=keep, protect=protect, in_use=in_use, retain=retain)
        gone = [version for version in there if version not in stays]
        if gone and line.head is not None:
            self._move(line.head, line.orphaned, without=gone)
        for version in reversed(gone):  # nothing is taken away before what is made of it
            sealed.remove(self.path(version))
        return gone

    def _bases(self, line: Line) -> dict[int, int]:
        """Of the versions that are adapters, what they belong to. Those with a delta are none."""
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
                "version numbers are never used twice: take one above `highest()`",
            )
        if parent is not None and parent != self.head():
            raise WeightsError(
                f"version {version} comes from {parent}, but the head is {self.head()}",
                "another trainer has taken over this policy: stop this one",
            )

    def _move(
        self, head: int, orphaned: Collection[int], *, anew: Collection[int] = (), without: Collection[int] = ()
    ) -> None:
        write_atomic(self._folder / HEAD, sealed.as_text(self._next_line(head, orphaned, anew, without)))

    def _next_line(
        self, head: int, orphaned: Collection[int], anew: Collection[int] = (), without: Collection[int] = ()
    ) -> Line:
        """Entries of versions that were written `anew` are looked up; others are as they were."""
        known = {version: entry for version, entry in self.line().entries.items() if version not in anew}
        entries = {version: entry for version, entry in self._entries(known).items() if version not in without}
        return signing.signed(Line(head=head, orphaned=frozenset(orphaned), entries=entries), self._key)


# What computes on weights is imported when it is needed: its compiler takes longer to load than all the rest.


def _previous() -> Previous:
    from rillflow.weights.previous import Previous

    return Previous()


def _parts(tensors: Tensors) -> dict[Part, torch.Tensor]:
    from rillflow.weights.delta.container import Part

    return {Part(name, 0, tensor.numel()): tensor.detach().contiguous() for name, tensor in tensors.items()}


def _facts(tensors: Tensors) -> dict[str, object]:
    return {name: tensor_facts(tensor) for name, tensor in tensors.items()}


def _files(
    tensors: Tensors, found: Difference | None, adapter: AdapterFacts | None, *, whole: bool
) -> Iterator[tuple[str, sealed.Content]]:
    if found is not None:
        from rillflow.weights.delta import container

        yield f"{DELTA}.rfd", container.write(found.pieces)
    if whole:
        yield from encode(tensors, "model" if adapter is None else "adapter")
