"""A power cut for segment files: bytes that were not synced are lost, page by page, and so are new files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rillflow.storage import segments

PAGE = 4096


class Disk:
    """Records what is synced of a folder's segments, and drops the rest at `cut`.

    A page that was not synced survives, is zeroed or is torn in its middle; a file whose folder was not synced survives
    or is gone: the kernel writes back in any order. The random generator decides.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
        self._folder = folder.resolve()
        self._chance = chance
        self._synced: dict[Path, int] = {}  # bytes of each file that are on the disk
        self._entered: set[Path] = set()
        plain_file, plain_folder = os.fdatasync, segments.fsync_folder

        def sync_file(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            size = len(path.read_bytes().rstrip(b"\0"))  # the rest is preallocated
            plain_file(descriptor)
            self._synced[path] = -(-size // 8) * 8  # records end at multiples of 8

        def sync_folder(path: Path) -> None:
            found = set(path.resolve().glob("*.seg"))
            plain_folder(path)
            self._entered |= found

        monkeypatch.setattr("rillflow.storage.segments.os.fdatasync", sync_file)
        monkeypatch.setattr("rillflow.storage.segments.fsync_folder", sync_folder)

    def cut(self) -> None:
        """Call this once no process has the files open."""
        for path in sorted(self._folder.glob("*.seg")):
            if path not in self._entered and self._chance.random() < 0.5:
                path.unlink()
                continue
            data = bytearray(path.read_bytes())
            synced = self._synced.get(path, 0)
            for start in range(synced // PAGE * PAGE, len(data), PAGE):
                self._lose_page(data, max(start, synced), start + PAGE)
            path.write_bytes(data[: max(synced, self._chance.randrange(len(data) + 1))])

    def _lose_page(self, data: bytearray, start: int, end: int) -> None:
        end = min(end, len(data))
        fate = self._chance.choice(("kept", "zeroed", "torn"))
        if fate == "torn":
            start = max(start, end - PAGE // 2)
        if fate != "kept":
            data[start:end] = bytes(end - start)
