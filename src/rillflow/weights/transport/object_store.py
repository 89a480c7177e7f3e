"""A weight store in an object store (any that fsspec supports), with the layout of the folder: read, and written.

A source reads it. An uploader copies a trainer's store into it, in its own thread.

Invariants of the source: files have the hashes of their manifest, and with a key the run's signature; a file gets its
name in the cache only after it was verified, and bytes that have arrived are not fetched again.

Invariants of the uploader: publishing never waits for it; at most one copy is pending, of the store's latest state,
however many versions were published meanwhile; in the object store a manifest appears after all its files, and a head
after all versions that it names; versions that are being copied stay in the store. Failures are retried while the
trainer runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, CorruptData, Unavailable, WeightsError
from rillflow.weights.manifest import (
    EMPTY,
    FOLDER_NAME,
    HEAD,
    Line,
    VersionManifest,
    folder_name,
    parse_line,
    parse_manifest,
)
from rillflow.weights.sealed import MANIFEST, FileFacts, as_text
from rillflow.weights.transport.cache import FileCache, PartFile, is_whole
from rillflow.weights.transport.sources import when_changed
from rillflow.wire import in_thread

if TYPE_CHECKING:
    from rillflow.weights.store import FolderStore

T = TypeVar("T")

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between two looks at the line
_BLOCK = 8 << 20
_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_DEADLINE = 120.0  # seconds for a block
_SMALL_DEADLINE = 15.0  # seconds for a line or a manifest: a starting node waits for it
_UPLOAD_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts to copy


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of an fsspec URL, and the path in it."""
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {url}: {error}", "weights.source: install fsspec's package for it (s3fs, gcsfs, adlfs …)"
        ) from error
    return files, root.rstrip("/")


class ObjectSource:
    """`WeightSource` on an object store. Only this reader uses `cache`, which survives restarts."""

    def __init__(
        self,
        url: str,
        cache: Path,
        key: bytes = b"",
        *,
        streams: int = 4,
        poll: float = _POLL,
        clock: Clock | None = None,
        deadline: float = _DEADLINE,
    ) -> None:
        self._url = url
        self._files, self._root = open_url(url)
        self._key = key
        self._cache = FileCache(cache)
        self._streams = streams
        self._poll = poll
        self._clock = clock or SystemClock()
        self._deadline = deadline
        self._seen: tuple[bytes, Line] = (b"", EMPTY)
        self._fetching: dict[tuple[int, str], asyncio.Lock] = {}

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        return await when_changed(self._look, known, wait, self._poll, self._clock)

    async def _look(self) -> Line:
        try:
            data = await self._asked(self._files.cat_file, f"{self._root}/{HEAD}")
        except WeightsError:
            return EMPTY
        if data != self._seen[0]:
            self._seen = (data, parse_line(data, self._key, f"{self._url}/{HEAD}"))
        return self._seen[1]

    async def manifest(self, version: int) -> VersionManifest:
        where = f"{folder_name(version)}/{MANIFEST}"
        data = await self._asked(self._files.cat_file, f"{self._root}/{where}")
        return parse_manifest(data, version, self._key, f"{self._url}/{where}")

    async def file(self, version: int, name: str) -> Path:
        facts = (await self.manifest(version)).files.get(name)
        if facts is None:
            raise WeightsError(f"version {version} has no file {name!r}", "look at its manifest")
        path = self._cache.folder / folder_name(version) / name
        async with self._fetching.setdefault((version, name), asyncio.Lock()):
            if not await asyncio.to_thread(is_whole, path, facts):
                await asyncio.to_thread(self._cache.make_room, path, facts.size)
                await self._fetch(path, f"{self._root}/{folder_name(version)}/{name}", facts)
        return path

    async def _fetch(self, path: Path, where: str, facts: FileFacts) -> None:
        """Fetch a file in blocks, several at a time."""
        part = PartFile(path, facts)
        blocks = [
            (at, min(at + _BLOCK, end))
            for start, end in part.have.missing(facts.size)
            for at in range(start, end, _BLOCK)
        ]

        noting = asyncio.Lock()

        async def stream() -> None:
            while blocks:
                start, end = blocks.pop(0)
                data = await self._asked(self._files.cat_file, where, start, end, deadline=self._deadline)
                if len(data) != end - start:
                    raise CorruptData(f"{where} is shorter than its manifest says", "it was cut: publish it again")
                await in_thread(partial(part.write, start, data))
                part.have.add(start, end)
                async with noting:
                    await in_thread(part.note)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._streams, len(blocks))):
                    group.create_task(stream())
            await in_thread(part.finish)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except CorruptData:
            part.restart()
            raise
        finally:
            part.close()

    async def _asked(self, call: Callable[..., T], *arguments: Any, deadline: float | None = None) -> T:
        """Call the object store; retry errors other than a missing file."""
        pause = _FIRST_PAUSE
        seconds = deadline or min(self._deadline, _SMALL_DEADLINE)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await asyncio.wait_for(asyncio.to_thread(call, *arguments), seconds)
            except FileNotFoundError as error:
                raise WeightsError(
                    f"{arguments[0]} does not exist", "it was removed or never published: look at the line again"
                ) from error
            except Exception as error:  # each object store has its own errors
                if attempt == _ATTEMPTS:
                    raise Unavailable(
                        f"{self._url} does not answer: {type(error).__name__}: {error}",
                        "check the network and the credentials for this store; received bytes are kept",
                    ) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("not reached")

    async def forget(self, version: int) -> None:
        for key in [key for key in self._fetching if key[0] == version]:
            del self._fetching[key]
        await asyncio.to_thread(self._cache.remove, self._cache.folder / folder_name(version))

    async def close(self) -> None: ...


# ---------------------------------------------------------------- copying a store


class Uploader:
    """Copies one store to `url`. Only the store's writer has an uploader."""

    def __init__(self, store: FolderStore, url: str, *, pause: float = _UPLOAD_PAUSE) -> None:
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
