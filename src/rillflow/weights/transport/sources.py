"""Sources of a policy's versions: the store's folder, an object store, and a wrapper with its own thread.

An object store (any that fsspec supports) has the layout of the folder.

Invariants: files have the hashes of their manifest, and with a key the run's signature; a file of an object store gets
its name in the cache only after it was verified, and bytes that have arrived are not fetched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, CorruptData, Unavailable, WeightsError
from rillflow.weights import sealed
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import (
    EMPTY,
    HEAD,
    Line,
    VersionManifest,
    WeightSource,
    check_signature,
    folder_name,
    parse_line,
    parse_manifest,
)
from rillflow.weights.transport.cache import FileCache, PartFile, is_whole
from rillflow.wire import LoopThread, in_thread

T = TypeVar("T")


class _Loop(LoopThread):
    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work in the thread's loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class ApartSource:
    """A weight source with its own event loop and thread, which ends with `close`. It must be the only user of
    `source`.

    An engine on a CPU computes in its process's event loop, so other tasks run once per token: a transfer over a long
    link, which has many small steps, would take many times as long. And threads that hang in a store which does not
    answer must not be threads that the process needs.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._loop = _Loop("weights")

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        return await self._loop.call(self._source.line(known, wait))

    async def manifest(self, version: int) -> VersionManifest:
        return await self._loop.call(self._source.manifest(version))

    async def file(self, version: int, name: str) -> Path:
        return await self._loop.call(self._source.file(version, name))

    async def forget(self, version: int) -> None:
        await self._loop.call(self._source.forget(version))

    async def close(self) -> None:
        try:
            await self._loop.call(self._source.close())
        finally:
            await asyncio.to_thread(self._loop.close)


# ---------------------------------------------------------------- folders and object stores


_FOLDER_POLL, _OBJECT_POLL = 0.05, 1.0
_BLOCK = 8 << 20
_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_DEADLINE = 120.0  # seconds for a block
_SMALL_DEADLINE = 15.0  # seconds for a line or a manifest: a starting node waits for it


def open_source(
    where: str | Path, policy: str, *, key: bytes = b"", cache: Path, streams: int = 4, token: str = ""
) -> WeightSource:
    """Return the source of a policy's weights. `where` holds those of all policies: a folder, URLs of weight servers or
    relays (separated by commas), or an fsspec URL. Files from URLs are stored in `cache`."""
    text = str(where)
    if text.startswith(("http://", "https://")):
        from rillflow.weights.transport.remote import HttpSource

        return ApartSource(HttpSource(f"{text}/{policy}", cache=cache / policy, key=key, token=token, streams=streams))
    if "://" in text:
        return ApartSource(ObjectSource(f"{text.rstrip('/')}/{policy}", cache / policy, key, streams=streams))
    return FolderSource(Path(where) / policy, key)


class FolderSource:
    """`WeightSource` on the store's own folder: files are not copied."""

    def __init__(
        self, folder: Path, key: bytes = b"", *, poll: float = _FOLDER_POLL, clock: Clock | None = None
    ) -> None:
        self._store = Folder(folder)
        self._key = key
        self._poll = poll
        self._clock = clock or SystemClock()
        self._checked: Line | None = None

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        return await _when_changed(self._look, known, wait, self._poll, self._clock)

    async def _look(self) -> Line:
        line = await asyncio.to_thread(self._store.line)
        if line is not self._checked and line.head is not None:
            check_signature(line, self._key, "the head of the weight store")
            self._checked = line
        return line

    async def manifest(self, version: int) -> VersionManifest:
        manifest = await asyncio.to_thread(self._store.manifest, version)
        check_signature(manifest, self._key, f"the manifest of version {version}")
        return manifest

    async def file(self, version: int, name: str) -> Path:
        manifest = await self.manifest(version)
        folder = self._store.path(version)
        await asyncio.to_thread(sealed.verify_file, folder, name, manifest)
        return folder / name

    async def forget(self, version: int) -> None:
        """Do nothing: the file belongs to the store."""

    async def close(self) -> None: ...


class ObjectSource:
    """`WeightSource` on an object store. Only this reader uses `cache`, which survives restarts."""

    def __init__(
        self,
        url: str,
        cache: Path,
        key: bytes = b"",
        *,
        streams: int = 4,
        poll: float = _OBJECT_POLL,
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
        return await _when_changed(self._look, known, wait, self._poll, self._clock)

    async def _look(self) -> Line:
        try:
            data = await self._asked(self._files.cat_file, f"{self._root}/{HEAD}")
        except WeightsError:
            return EMPTY
        if data != self._seen[0]:
            self._seen = (data, parse_line(data, self._key, f"{self._url}/{HEAD}"))
        return self._seen[1]

    async def manifest(self, version: int) -> VersionManifest:
        where = f"{folder_name(version)}/{sealed.MANIFEST}"
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

    async def _fetch(self, path: Path, where: str, facts: sealed.FileFacts) -> None:
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


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of an fsspec URL, and the path in it."""
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {url}: {error}", "weights.source: install fsspec's package for it (s3fs, gcsfs, adlfs …)"
        ) from error
    return files, root.rstrip("/")


async def _when_changed(
    look: Callable[[], Awaitable[Line]], known: Line | None, wait: float, poll: float, clock: Clock
) -> Line:
    """Return the line as soon as it differs from `known`, or after `wait` seconds."""
    end = clock.monotonic() + wait
    while True:
        line = await look()
        left = end - clock.monotonic()
        if line != known or left <= 0:
            return line
        await asyncio.sleep(min(poll, left))
