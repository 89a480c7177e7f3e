"""Copies a weight store to an object store, in its own thread.

Invariants: publishing never waits for it; at most one copy is pending, of the store's latest state, however many
versions were published meanwhile; in the object store a manifest appears after all its files, and a head after all
versions that it names; versions that are being copied stay in the store. Failures are retried while the trainer runs.
"""

from __future__ import annotations

import logging
import threading
import time

from rillflow.weights.manifest import FOLDER_NAME, HEAD, Line, folder_name, parse_manifest
from rillflow.weights.sealed import MANIFEST, as_text
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import open_url

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class Uploader:
    """Copies one store to `url`. Only the store's writer has an uploader."""

    def __init__(self, store: FolderStore, url: str, *, pause: float = _FIRST_PAUSE) -> None:
        self._store = store
        self._url = url
        self._files, self._root = open_url(url)
        self._pause = pause
        self._there: dict[int, bytes] | None = None  # the manifests of the versions in the object store
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0

    def poke(self) -> None:
        """Request a copy after a change of the store. Returns at once."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def close(self, patience: float) -> bool:
        """End after a last copy, or a last attempt; return whether it succeeded within `patience`."""
        self._closing.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                log.warning("%s: not all versions were copied within %.0f s", self._url, patience)
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
            except Exception as error:  # each object store has its own errors, and none may end the trainer
                self.failures += 1
                self._there = None
                self._wanted.set()
                log.warning("%s: copying versions failed: %s: %s", self._url, type(error).__name__, error)
                if not last:
                    self._closing.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
            if last:
                return

    def copy(self) -> None:
        """Bring the object store to the state of the store."""
        if self._there is None:
            self._there = self._found()
        line = self._store.line()
        self._store.copying = set(line.entries)  # otherwise a slow object store would never get all of a line
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
                self._wanted.set()  # it was removed a moment ago: copy the new state
                return
        self._replace(HEAD, as_text(line))
        for version in sorted(set(self._there) - set(line.entries), reverse=True):
            self._remove(version)

    def _found(self) -> dict[int, bytes]:
        """Return the versions that an earlier trainer has copied."""
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
                    there[int(match[1])] = b""  # a partial copy
        return there

    def _copy_version(self, version: int) -> None:
        folder = self._store.path(version)
        manifest = (folder / MANIFEST).read_bytes()
        assert self._there is not None
        if self._there.get(version) == manifest:
            return
        started = time.perf_counter()
        if version in self._there:  # a partial copy, or the version before it was mended
            self._remove(version)
        self._files.makedirs(f"{self._root}/{folder.name}", exist_ok=True)
        for name in parse_manifest(manifest, version, b"", str(folder)).files:
            self._files.put_file(str(folder / name), f"{self._root}/{folder.name}/{name}")
        self._replace(f"{folder.name}/{MANIFEST}", manifest)
        self._there[version] = manifest
        log.info("%s: version %d copied in %.1f s", self._url, version, time.perf_counter() - started)

    def _remove(self, version: int) -> None:
        assert self._there is not None
        self._files.rm(f"{self._root}/{folder_name(version)}", recursive=True)
        del self._there[version]

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a small file atomically: not every object store writes atomically."""
        target = f"{self._root}/{name}"
        self._files.pipe_file(f"{target}.new", data)
        self._files.mv(f"{target}.new", target)


def uploader(store: FolderStore, source: str | None, policy: str) -> Uploader | None:
    """Return an uploader if the recipe's `weights.source` is an object store, else None."""
    if source is None or "://" not in source or source.startswith(("http://", "https://")):
        return None
    return Uploader(store, f"{source.rstrip('/')}/{policy}")
