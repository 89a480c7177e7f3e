"""The folder of a weight store as its readers see it. `store` says what is in it, and writes it.

Invariants: nothing is returned that does not match the manifests; a version that is there in parts (deltas, an adapter)
is put together, so that who pulls it need not know.
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
from rillflow.weights import sealed, signing
from rillflow.weights.adapters import Adapter, merged
from rillflow.weights.codec import assembled, decode
from rillflow.weights.manifest import EMPTY, FOLDER_NAME, HEAD, Entry, Line, VersionManifest, folder_name


class Folder:
    """`contracts.WeightStore` on a local or shared folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[object, Line] = (None, EMPTY)  # which file, and what is in it: threads see both or neither
        self._base: tuple[str, dict[str, torch.Tensor]] | None = None  # by the hash of its manifest

    def line(self) -> Line:
        """Head, orphans and what there is. Cheap enough to poll: the file is read only when it has been replaced."""
        path = self._folder / HEAD
        try:
            stat = path.stat()
            file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            seen, line = self._seen
            if file != seen:
                line = self._filled(signing.parse_line(path.read_bytes(), b"", str(path)))
                self._seen = file, line
        except FileNotFoundError:
            return EMPTY
        return line

    def _filled(self, line: Line) -> Line:
        """Lines once had no entries: they are in the manifests."""
        if line.head is None or line.entries:
            return line
        return msgspec.structs.replace(line, entries=self._entries({}))

    def _entries(self, known: Mapping[int, Entry]) -> dict[int, Entry]:
        """Of all versions that are there and have a valid manifest; those that are `known` are not looked at again."""
        entries = {}
        for version in self.versions():
            with suppress(CorruptData, WeightsError):
                entries[version] = known.get(version) or self.manifest(version).entry
        return entries

    def head(self) -> int | None:
        return self.line().head

    def versions(self) -> list[int]:
        """The versions that can be pulled, orphaned ones included, in ascending order."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(FOLDER_NAME.fullmatch, names) if match)

    def highest(self) -> int:
        """The highest number ever used, orphaned, pruned and never committed versions included; -1 when none was.

        What a killed writer left half written was never visible, so its number was not used.
        """
        line = self.line()
        return max({-1 if line.head is None else line.head, *line.orphaned, *self.versions()})

    def manifest(self, version: int) -> VersionManifest:
        folder = self.path(version)
        if not folder.is_dir():
            raise WeightsError(f"version {version} is not in {self._folder}", "it was pruned or never published")
        manifest = sealed.read_manifest(folder, VersionManifest)
        if manifest.version != version:
            raise CorruptData(f"{folder} holds version {manifest.version}", "the folder was renamed or damaged")
        return manifest

    def probe(self, version: int) -> Probe | None:
        """What an engine must reproduce of a version; None: nothing."""
        return self.manifest(version).probe

    def path(self, version: int) -> Path:
        return self._folder / folder_name(version)

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors of a version; CorruptData when one bit differs from what was published."""
        manifest = self.manifest(version)
        adapter = self._adapter(manifest)
        return merged(self._base_of(manifest), adapter) if adapter is not None else dict(self._put_together(manifest))

    def adapter(self, version: int) -> Adapter | None:
        """What a version published of itself, if that is an adapter."""
        return self._adapter(self.manifest(version))

    def _adapter(self, manifest: VersionManifest) -> Adapter | None:
        facts = manifest.adapter
        return None if facts is None else Adapter(self._read(manifest), facts.rank, facts.alpha)

    def _put_together(self, manifest: VersionManifest) -> Mapping[str, torch.Tensor]:
        """From the newest whole version, delta by delta."""
        first, *deltas = reversed(list(self._chain(manifest)))
        if not deltas:
            return self._read(first)
        from rillflow.weights.held import Held, Step

        held = Held()
        held.replace(self._read(first), first)
        for step in deltas:
            folder = self.path(step.version)
            for name in step.delta_files:
                sealed.verify_file(folder, name, step)
            try:
                held.advance([Step(step, [folder / name for name in step.delta_files])])
            except WeightsError as error:
                raise CorruptData(
                    f"{folder} does not fit the versions before it: {error}", "one was changed"
                ) from error
        return held.tensors

    def _chain(self, manifest: VersionManifest) -> Iterator[VersionManifest]:
        """The version and those before it whose deltas it needs, to a whole one."""
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
                f"version {by.version} belongs to {version}, which is not there", "it was removed"
            ) from error

    def _read(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        folder = self.path(manifest.version)
        names = manifest.full_files
        return assembled(manifest, {n: decode(sealed.read_file(folder, n, manifest), str(folder / n)) for n in names})

    def _base_of(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        """The full version that an adapter belongs to. It is kept: every version of the policy has the same."""
        assert manifest.adapter is not None
        base = self._needed(manifest.adapter.base, manifest)
        if base.adapter is not None:
            raise CorruptData(f"version {base.version} is a base and an adapter", "the manifest was changed")
        key = str(sorted((name, facts.sha256) for name, facts in base.files.items()))
        if self._base is None or self._base[0] != key:
            self._base = (key, dict(self._put_together(base)))
        return self._base[1]
