"""Where nodes read a policy's versions without a server in between: the store's folder itself, or an object store.

An object store (any that fsspec knows) has the layout of the folder. Invariants: what is handed out has the hashes of
its manifest, and with a key also the run's signature; a file of an object store gets its name in the cache only after
it was verified, and what has come of it is not fetched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, CorruptData, Unavailable, WeightsError
from rillflow.storage import file_hash
from rillflow.weights import sealed, signing
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import EMPTY, HEAD, Line, VersionManifest, folder_name
from rillflow.weights.source import WeightSource
from rillflow.weights.transport.apart import ApartSource
from rillflow.weights.transport.cache import FileCache
from rillflow.weights.transport.partial import PartFile
from rillflow.wire import in_thread

T = TypeVar("T")

_FOLDER_POLL, _OBJECT_POLL = 0.05, 1.0
_BLOCK = 8 << 20
_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_DEADLINE = 120.0  # for a block
_SMALL_DEADLINE = 15.0  # for a line or a manifest: a node that starts waits for it


def open_source(
    where: str | Path, policy: str, *, key: bytes = b"", cache: Path, streams: int = 4, token: str = ""
) -> WeightSource:
    """The source of a policy's weights. `where` holds those of all policies: a folder, URLs of weight servers or relays
    (with commas between them), or a URL that fsspec knows. `cache` is for the files of those that are far."""
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
            signing.check(line, self._key, "the head of the weight store")
            self._checked = line
        return line

    async def manifest(self, version: int) -> VersionManifest:
        manifest = await asyncio.to_thread(self._store.manifest, version)
        signing.check(manifest, self._key, f"the manifest of version {version}")
        return manifest

    async def file(self, version: int, name: str) -> Path:
        manifest = await self.manifest(version)
        folder = self._store.path(version)
        await asyncio.to_thread(sealed.verify_file, folder, name, manifest)
        return folder / name

    async def forget(self, version: int) -> None:
        """The file is the store's, which removes it when nobody needs it."""

    async def close(self) -> None: ...


class ObjectSource:
    """`WeightSource` on an object store. `cache` is of this reader alone; what is in it survives restarts."""

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
            self._seen = (data, signing.parse_line(data, self._key, f"{self._url}/{HEAD}"))
        return self._seen[1]

    async def manifest(self, version: int) -> VersionManifest:
        where = f"{folder_name(version)}/{sealed.MANIFEST}"
        data = await self._asked(self._files.cat_file, f"{self._root}/{where}")
        return signing.parse_manifest(data, version, self._key, f"{self._url}/{where}")

    async def file(self, version: int, name: str) -> Path:
        facts = (await self.manifest(version)).files.get(name)
        if facts is None:
            raise WeightsError(f"version {version} has no file {name!r}", "look at its manifest")
        path = self._cache.folder / folder_name(version) / name
        async with self._fetching.setdefault((version, name), asyncio.Lock()):
            if not await asyncio.to_thread(_is_whole, path, facts):
                await asyncio.to_thread(self._cache.make_room, path, facts.size)
                await self._fetch(path, f"{self._root}/{folder_name(version)}/{name}", facts)
        return path

    async def _fetch(self, path: Path, where: str, facts: sealed.FileFacts) -> None:
        """In blocks, several at a time."""
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
        """A call of the object store: tried again when it fails, not when there is no such file."""
        pause = _FIRST_PAUSE
        seconds = deadline or min(self._deadline, _SMALL_DEADLINE)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await asyncio.wait_for(asyncio.to_thread(call, *arguments), seconds)
            except FileNotFoundError as error:
                raise WeightsError(
                    f"{arguments[0]} is not there", "it was removed or never published: look at the line again"
                ) from error
            except Exception as error:  # each object store has errors of its own
                if attempt == _ATTEMPTS:
                    raise Unavailable(
                        f"{self._url} does not answer: {type(error).__name__}: {error}",
                        "check the network and the credentials for this store: what has come is kept",
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
    """The file system of an fsspec URL, and the path in it."""
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
    """The line as soon as it is another than `known`, or as it is after `wait` seconds."""
    end = clock.monotonic() + wait
    while True:
        line = await look()
        left = end - clock.monotonic()
        if line != known or left <= 0:
            return line
        await asyncio.sleep(min(poll, left))


def _is_whole(path: Path, facts: sealed.FileFacts) -> bool:
    try:
        return path.stat().st_size == facts.size and file_hash(path) == facts.sha256
    except OSError:
        return False
