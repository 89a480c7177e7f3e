"""The weight store of one policy: a folder of immutable, hashed versions and a head that names the live one.

    v00000012/model.safetensors, manifest.json      sealed: whole or absent, never changed
    v00000013/adapter.safetensors, manifest.json    of a LoRA policy: the adapter alone, and which version it belongs to
    head.json                                       {"head": 12, "orphaned": [9, 10]}

Invariants: a version number is used once, also after pruning; `head.json` moves only after the version it names is in
place; what `pull` returns matches the manifests, and is always whole: readers need not know of adapters; the base of an
adapter that is kept is kept; a version is written again only by `mend`, when it is damaged. There is one writer (the
policy's trainer) and any number of readers, which need nothing but the files.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.errors import CorruptData, WeightsError
from rillflow.storage import read_json, write_json
from rillflow.weights import sealed
from rillflow.weights.adapters import Adapter, AdapterFacts, merged
from rillflow.weights.codec import decode, encode, tensor_facts, unique
from rillflow.weights.manifest import Line, VersionManifest

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

_VERSION = re.compile(r"v(\d{8,})")


_EMPTY = Line(head=None, orphaned=frozenset())


class FolderStore:
    """`contracts.WeightStore` on a local or shared folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._line = _EMPTY
        self._base: tuple[str, dict[str, torch.Tensor]] | None = None  # by the hash of its manifest

    # ------------------------------------------------------------ reading

    def line(self) -> Line:
        """Head and orphans. Cheap enough to poll: the file is read only when it has been replaced."""
        path = self._folder / "head.json"
        try:
            stat = path.stat()
        except FileNotFoundError:
            return _EMPTY
        seen = (stat.st_ino, stat.st_mtime_ns)
        if seen != self._seen:
            try:
                self._line = msgspec.convert(read_json(path), Line)
            except msgspec.ValidationError as error:
                raise CorruptData(
                    f"{path} does not name a head: {error}", "remove it: a trainer that starts writes it anew"
                ) from error
            self._seen = seen
        return self._line

    def head(self) -> int | None:
        return self.line().head

    def versions(self) -> list[int]:
        """The versions that can be pulled, orphaned ones included, in ascending order."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_VERSION.fullmatch, names) if match)

    def highest(self) -> int:
        """The highest number ever used, orphaned, pruned and never committed versions included; -1 when none was.

        What a killed writer left half written was never visible, so its number was not used.
        """
        line = self.line()
        return max({-1 if line.head is None else line.head, *line.orphaned, *self.versions()})

    def manifest(self, version: int) -> VersionManifest:
        folder = self._path(version)
        if not folder.is_dir():
            raise WeightsError(f"version {version} is not in {self._folder}", "it was pruned or never published")
        manifest = sealed.read_manifest(folder, VersionManifest)
        if manifest.version != version:
            raise CorruptData(f"{folder} holds version {manifest.version}", "the folder was renamed or damaged")
        return manifest

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors of a version; CorruptData when one bit differs from what was published."""
        manifest = self.manifest(version)
        adapter = self._adapter(manifest)
        return self._read(manifest) if adapter is None else merged(self._base_of(manifest), adapter)

    def adapter(self, version: int) -> Adapter | None:
        """What a version published of itself, if that is an adapter."""
        return self._adapter(self.manifest(version))

    def _adapter(self, manifest: VersionManifest) -> Adapter | None:
        facts = manifest.adapter
        return None if facts is None else Adapter(self._read(manifest), facts.rank, facts.alpha)

    def _read(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        folder = self._path(manifest.version)
        tensors: dict[str, torch.Tensor] = {}
        for name in manifest.files:
            tensors |= decode(sealed.read_file(folder, name, manifest), str(folder / name))
        if {name: tensor_facts(tensor) for name, tensor in tensors.items()} != manifest.tensors:
            raise CorruptData(f"{folder} does not hold the tensors its manifest names", "the manifest was changed")
        if not set(manifest.aliases.values()) <= set(tensors):
            raise CorruptData(f"{folder} has aliases of tensors it does not hold", "the manifest was changed")
        return tensors | {alias: tensors[name] for alias, name in manifest.aliases.items()}

    def _base_of(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        """The full version that an adapter belongs to. It is kept: every version of the policy has the same."""
        assert manifest.adapter is not None
        try:
            base = self.manifest(manifest.adapter.base)
        except WeightsError as error:
            raise CorruptData(
                f"version {manifest.version} belongs to {manifest.adapter.base}, which is not there", "it was removed"
            ) from error
        if base.adapter is not None:
            raise CorruptData(f"version {base.version} is a base and an adapter", "the manifest was changed")
        key = str(sorted((name, facts.sha256) for name, facts in base.files.items()))
        if self._base is None or self._base[0] != key:
            self._base = (key, self._read(base))
        return self._base[1]

    # ------------------------------------------------------------ writing

    def publish(self, tensors: Tensors, version: int, parent: int | None) -> None:
        """Write a version and make it the head. `parent` is the head it was trained from; None for a root."""
        self._check_new(version, parent)
        self._write(tensors, version, parent)
        self._move(version, self.line().orphaned)

    def publish_adapter(self, adapter: Adapter, version: int, parent: int | None, base: int) -> None:
        """The same for a version that is an adapter of `base`, a full one."""
        self._check_new(version, parent)
        if self.manifest(base).adapter is not None:
            raise WeightsError(f"version {base} is an adapter itself", "adapters belong to a version of all weights")
        self._write(adapter.tensors, version, parent, AdapterFacts(adapter.rank, adapter.alpha, base))
        self._move(version, self.line().orphaned)

    def mend(self, tensors: Tensors, version: int) -> bool:
        """Write `version` again if it is missing, damaged or of other tensors than these; whether it was.

        For a trainer that begins again at `version`: what nodes are to pull must be there.
        """
        try:
            if {name: tensor_facts(tensor) for name, tensor in self.pull(version).items()} == {
                name: tensor_facts(tensor) for name, tensor in tensors.items()
            }:
                return False
        except (CorruptData, WeightsError) as error:
            log.warning("version %d is written again: %s", version, error)
        if self._path(version).exists():
            sealed.remove(self._path(version))
        self._write(tensors, version, parent=None)
        return True

    def _write(self, tensors: Tensors, version: int, parent: int | None, adapter: AdapterFacts | None = None) -> None:
        kept, aliases = unique(tensors)
        facts = {
            "version": version,
            "parent": parent,
            "created": time.time(),
            "tensors": {name: tensor_facts(tensor) for name, tensor in kept.items()},
            "aliases": aliases,
            "adapter": adapter,
        }
        try:
            sealed.seal(self._path(version), encode(kept, "model" if adapter is None else "adapter"), facts)
        except sealed.AlreadySealed as error:
            raise WeightsError(f"version {version} exists already", "version numbers are never used twice") from error

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again; versions after it are orphaned (returned: those that were not before)."""
        self.manifest(version)
        sealed.remove_leftovers(self._folder)
        line = self.line()
        if version in line.orphaned:
            raise WeightsError(f"version {version} is orphaned", "rewind to a version of the live line")
        known = {*self.versions(), version if line.head is None else line.head} - line.orphaned
        orphaned = sorted(number for number in known if number > version)
        if orphaned or line.head != version:
            self._move(version, line.orphaned.union(orphaned))
        return orphaned

    def prune(self, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Remove orphaned and old versions, never the head, the newest `keep`, those in `protect`, or their bases."""
        line = self.line()
        live = [version for version in self.versions() if version not in line.orphaned]
        kept = {line.head, *live[-keep:], *protect} if keep else {line.head, *protect}
        kept |= self._bases(kept)
        gone = [version for version in self.versions() if version not in kept]
        for version in gone:
            sealed.remove(self._path(version))
        return gone

    def _bases(self, versions: Collection[int | None]) -> set[int]:
        """The versions that these, as far as they are there and whole, belong to."""
        bases: set[int] = set()
        for version in self.versions():
            if version in versions:
                with suppress(CorruptData):
                    adapter = self.manifest(version).adapter
                    bases |= {adapter.base} if adapter is not None else set()
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

    def _move(self, head: int, orphaned: Collection[int]) -> None:
        write_json(self._folder / "head.json", {"head": head, "orphaned": sorted(orphaned)})

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"
