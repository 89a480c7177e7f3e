"""Copies a weight store to an object store, in a thread of its own.

Invariants: nobody who publishes waits for it; what waits is at most one copy, of the store as it is by then, however
many versions have come meanwhile; a reader of the object store finds a manifest after all its files, and a head after
all versions that it names; what is being copied stays in the store meanwhile. What fails is tried again, without end,
while the trainer runs.
"""

from __future__ import annotations

import logging
import threading
import time

from rillflow.weights import signing
from rillflow.weights.manifest import FOLDER_NAME, HEAD, Line, folder_name
from rillflow.weights.sealed import MANIFEST, as_text
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.objects import open_url

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class Uploader:
    """Of one store to `url`. Only the store's writer has one."""

    def __init__(self, store: FolderStore, url: str, *, pause: float = _FIRST_PAUSE) -> None:
        self._store = store
        self._url = url
        self._files, self._root = open_url(url)
        self._pause = pause
        self._there: dict[int, bytes] | None = None  # versions that are there, by their manifests
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0

    def poke(self) -> None:
        """The store has changed. Returns at once."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def close(self, patience: float) -> bool:
        """End after what is wanted was copied, or was tried once more; whether it was there within `patience`."""
        self._closing.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                log.warning("%s: not all versions were copied there within %.0f s", self._url, patience)
                return False
        return self.failures == 0

    def _run(self) -> None:
        pause = self._pause
        while True:
            self._wanted.wait()
            self._wanted.clear()
            last = self._closing.is_set()
            try:
                self.copy()
                self.failures, pause = 0, self._pause
            except Exception as error:  # each object store has errors of its own, and none may end the trainer
                self.failures += 1
                self._there = None
                self._wanted.set()
                log.warning("%s: versions are not copied there: %s: %s", self._url, type(error).__name__, error)
                if not last:
                    self._closing.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
            if last:
                return

    def copy(self) -> None:
        """Make the object store what the store is now."""
        if self._there is None:
            self._there = self._found()
        line = self._store.line()
        self._store.copying = set(line.entries)  # else a slow store would never get all of a line
        try:
            self._copy_line(line)
        finally:
            self._store.copying = ()

    def _copy_line(self, line: Line) -> None:
        assert self._there is not None
        for version in sorted(line.entries):
            try:
                self._copy_version(version)
            except FileNotFoundError:
                if version in self._store.line().entries:
                    raise
                self._wanted.set()  # it was removed a moment ago: the store has moved on, and so does this
                return
        self._replace(HEAD, as_text(line))
        for version in sorted(set(self._there) - set(line.entries), reverse=True):
            self._remove(version)

    def _found(self) -> dict[int, bytes]:
        """What an earlier trainer has copied."""
        there: dict[int, bytes] = {}
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return there
        for path in paths:
            if match := FOLDER_NAME.fullmatch(path.rstrip("/").rpartition("/")[2]):
                try:
                    there[int(match[1])] = self._files.cat_file(f"{path}/{MANIFEST}")
                except FileNotFoundError:
                    there[int(match[1])] = b""  # half of it
        return there

    def _copy_version(self, version: int) -> None:
        folder = self._store.path(version)
        manifest = (folder / MANIFEST).read_bytes()
        assert self._there is not None
        if self._there.get(version) == manifest:
            return
        started = time.perf_counter()
        if version in self._there:  # half of it, or what it was before it was mended
            self._remove(version)
        self._files.makedirs(f"{self._root}/{folder.name}", exist_ok=True)
        for name in signing.parse_manifest(manifest, version, b"", str(folder)).files:
            self._files.put_file(str(folder / name), f"{self._root}/{folder.name}/{name}")
        self._replace(f"{folder.name}/{MANIFEST}", manifest)
        self._there[version] = manifest
        log.info("%s: version %d copied in %.1f s", self._url, version, time.perf_counter() - started)

    def _remove(self, version: int) -> None:
        assert self._there is not None
        self._files.rm(f"{self._root}/{folder_name(version)}", recursive=True)
        del self._there[version]

    def _replace(self, name: str, data: bytes) -> None:
        """Small files, which a reader must not see half written: not every store writes at once."""
        target = f"{self._root}/{name}"
        self._files.pipe_file(f"{target}.new", data)
        self._files.mv(f"{target}.new", target)


def uploader(store: FolderStore, source: str | None, policy: str) -> Uploader | None:
    """Where the recipe's `weights.source` is an object store, what copies the policy's versions there."""
    if source is None or "://" not in source or source.startswith(("http://", "https://")):
        return None
    return Uploader(store, f"{source.rstrip('/')}/{policy}")
