"""The folder of a weight store as its readers see it. `store` describes and writes it.

Invariants: everything that is returned matches the manifests; a version stored as deltas or an adapter is returned as a
whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from rillflow.errors import CorruptData, WeightsError
from rillflow.types import Probe
from rillflow.weights import sealed
from rillflow.weights.codec import Adapter, assembled, decode, merged
from rillflow.weights.manifest import EMPTY, FOLDER_NAME, HEAD, Entry, Line, VersionManifest, folder_name, parse_line


class Folder:
    """`contracts.WeightStore` on a local or shared folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[object, Line] = (None, EMPTY)  # the file's identity and its line, assigned together
        self._base: tuple[str, dict[str, torch.Tensor]] | None = None  # with the hashes of its files

    def line(self) -> Line:
        """Return head, orphans and entries. Cheap to poll: the file is read only after it has been replaced."""
        path = self._folder / HEAD
        try:
            stat = path.stat()
            file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            seen, line = self._seen
            if file != seen:
                line = self._filled(parse_line(path.read_bytes(), b"", str(path)))
                self._seen = file, line
        except FileNotFoundError:
            return EMPTY
        return line

    def _filled(self, line: Line) -> Line:
        """Fill in entries from the manifests, for lines of earlier releases, which had none."""
        if line.head is None or line.entries:
            return line
        return msgspec.structs.replace(line, entries=self._entries({}))

    def _entries(self, known: Mapping[int, Entry]) -> dict[int, Entry]:
        """Return the entries of all versions with a valid manifest; those in `known` are not read again."""
        entries = {}
        for version in self.versions():
            with suppress(CorruptData, WeightsError):
                entries[version] = known.get(version) or self.manifest(version).entry
        return entries

    def head(self) -> int | None:
        return self.line().head

    def versions(self) -> list[int]:
        """Return the versions that can be pulled, including orphaned ones, in ascending order."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(FOLDER_NAME.fullmatch, names) if match)

    def highest(self) -> int:
        """Return the highest number ever used, also by orphaned, pruned and uncommitted versions; -1 if none was.

        A partial version of a killed writer was never visible, so its number is free.
        """
        line = self.line()
        return max({-1 if line.head is None else line.head, *line.orphaned, *self.versions()})

    def manifest(self, version: int) -> VersionManifest:
        folder = self.path(version)
        if not folder.is_dir():
            raise WeightsError(f"version {version} is not in {self._folder}", "it was removed or never published")
        manifest = sealed.read_manifest(folder, VersionManifest)
        if manifest.version != version:
            raise CorruptData(f"{folder} holds version {manifest.version}", "the folder was renamed or damaged")
        return manifest

    def probe(self, version: int) -> Probe | None:
        """Return the probe of a version, or None."""
        return self.manifest(version).probe

    def path(self, version: int) -> Path:
        return self._folder / folder_name(version)

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        """Return all tensors of a version; CorruptData if one bit differs from the published ones."""
        manifest = self.manifest(version)
        adapter = self._adapter(manifest)
        return merged(self._base_of(manifest), adapter) if adapter is not None else dict(self._put_together(manifest))

    def verify(self, manifest: VersionManifest) -> None:
        """Raise CorruptData if a file differs of those that a version of all weights is built from. It reads them block
        by block, which takes no memory."""
        for one in self._chain(manifest):
            for name in one.full_files or one.delta_files:
                sealed.verify_file(self.path(one.version), name, one)

    def adapter(self, version: int) -> Adapter | None:
        """Return the adapter of a version, or None for a version of all weights."""
        return self._adapter(self.manifest(version))

    def _adapter(self, manifest: VersionManifest) -> Adapter | None:
        facts = manifest.adapter
        return None if facts is None else Adapter(self._read(manifest), facts.rank, facts.alpha)

    def _put_together(self, manifest: VersionManifest) -> Mapping[str, torch.Tensor]:
        """Build a version from the newest whole one, delta by delta."""
        first, *deltas = reversed(list(self._chain(manifest)))
        if not deltas:
            return self._read(first)
        from rillflow.weights.node_weights import NodeWeights, Step

        held = NodeWeights()
        held.replace(self._read(first), first)
        for step in deltas:
            folder = self.path(step.version)
            for name in step.delta_files:
                sealed.verify_file(folder, name, step)
            try:
                held.advance([Step(step, [folder / name for name in step.delta_files])])
            except WeightsError as error:
                raise CorruptData(
                    f"{folder} does not fit the versions before it: {error}", "one of them was changed"
                ) from error
        return held.tensors

    def _chain(self, manifest: VersionManifest) -> Iterator[VersionManifest]:
        """Yield the version and its predecessors whose deltas it needs, back to a whole one."""
        yield manifest
        while not manifest.full_files:
            base = manifest.delta_of
            if base is None or base >= manifest.version:
                raise CorruptData(f"version {manifest.version} is neither whole nor a delta", "its manifest is damaged")
            manifest = self._needed(base, manifest)
            yield manifest

    def _needed(self, version: int, by: VersionManifest) -> VersionManifest:
        try:
            return self.manifest(version)
        except WeightsError as error:
            raise CorruptData(
                f"version {by.version} needs version {version}, which does not exist", "it was removed"
            ) from error

    def _read(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        folder = self.path(manifest.version)
        names = manifest.full_files
        return assembled(manifest, {n: decode(sealed.read_file(folder, n, manifest), str(folder / n)) for n in names})

    def _base_of(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        """Return the base of an adapter. It is cached: all versions of the policy have the same base."""
        assert manifest.adapter is not None
        base = self._needed(manifest.adapter.base, manifest)
        if base.adapter is not None:
            raise CorruptData(f"version {base.version} is both a base and an adapter", "the manifest was changed")
        key = str(sorted((name, facts.sha256) for name, facts in base.files.items()))
        if self._base is None or self._base[0] != key:
            self._base = (key, dict(self._put_together(base)))
        return self._base[1]
