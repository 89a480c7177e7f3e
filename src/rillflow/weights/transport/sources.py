"""Sources of a policy's versions: the store's folder, weight servers and relays, and a wrapper with its own thread.

`open_source` chooses one; `object_store` has the source for object stores.

Invariants: files have the hashes of their manifest, from any server, and with a key lines and manifests have the run's
signature. A download that was interrupted, also by the death of the process, continues from its place. Files that were
fetched stay until `forget`, or until a restart after their version was removed from the line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import (
    EMPTY,
    Line,
    VersionManifest,
    WeightSource,
    check_signature,
    folder_name,
    parse_line,
    parse_manifest,
)
from rillflow.weights.sealed import MANIFEST, FileFacts, verify_file
from rillflow.weights.transport.cache import FileCache, PartFile, is_whole
from rillflow.weights.transport.download import PATIENCE, Download
from rillflow.weights.transport.mirrors import STALL_SECONDS, Mirrors, NotThere
from rillflow.weights.transport.serve import NOTHING
from rillflow.wire import LoopThread
from rillflow.wire.tokens import reader_token

T = TypeVar("T")

_POLL = 0.05  # seconds between two looks at a folder
_WAIT = 20.0  # seconds that a request for a new line waits at the server
_FOLLOWED = 120.0  # seconds without a caller after which the line is no longer followed
_LEAST_PAUSE = 0.02
_KEPT = 100  # transfers, for statistics
_MANIFESTS = 256


def open_source(
    where: str | Path, policy: str, *, key: bytes = b"", cache: Path, streams: int = 4, token: str = ""
) -> WeightSource:
    """Return the source of a policy's weights. `where` holds those of all policies: a folder, URLs of weight servers or
    relays (separated by commas), or an fsspec URL. Files from URLs are stored in `cache`."""
    text = str(where)
    if text.startswith(("http://", "https://")):
        return ApartSource(HttpSource(f"{text}/{policy}", cache=cache / policy, key=key, token=token, streams=streams))
    if "://" in text:
        from rillflow.weights.transport.object_store import ObjectSource

        return ApartSource(ObjectSource(f"{text.rstrip('/')}/{policy}", cache / policy, key, streams=streams))
    return FolderSource(Path(where) / policy, key)


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


# ---------------------------------------------------------------- the store's folder


class FolderSource:
    """`WeightSource` on the store's own folder: files are not copied."""

    def __init__(self, folder: Path, key: bytes = b"", *, poll: float = _POLL, clock: Clock | None = None) -> None:
        self._store = Folder(folder)
        self._key = key
        self._poll = poll
        self._clock = clock or SystemClock()
        self._checked: Line | None = None

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        return await when_changed(self._look, known, wait, self._poll, self._clock)

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
        await asyncio.to_thread(verify_file, folder, name, manifest)
        return folder / name

    async def forget(self, version: int) -> None:
        """Do nothing: the file belongs to the store."""

    async def close(self) -> None: ...


async def when_changed(
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


# ---------------------------------------------------------------- weight servers and relays


class Transfer(NamedTuple):
    """Measurements of one fetched file: `bytes` without those that were there before, `sources` the servers used."""

    version: int
    name: str
    bytes: int
    seconds: float
    retries: int
    sources: Sequence[str]


class HttpSource:
    """`WeightSource` over HTTP.

    `where` is `URL/POLICY`, or several URLs separated by commas, then `/POLICY`: the nearest is asked, the others if it
    fails. `token` is the node's; only the reader token, which is derived from it, is sent.
    """

    def __init__(
        self,
        where: str,
        *,
        cache: Path,
        key: bytes = b"",
        token: str,
        streams: int = 4,
        limit: int | None = None,
        patience: float = PATIENCE,
        stall: float = STALL_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        urls, _, policy = where.rpartition("/")
        self._clock = clock or SystemClock()
        self._mirrors = Mirrors(urls.split(","), reader_token(token), clock=self._clock, stall=stall)
        self._path = f"/weights/{quote(policy, safe='')}"
        self._key = key
        self._streams = streams
        self._patience = patience
        self._stall = stall
        self._cache = FileCache(cache, limit)
        self._known: tuple[Line, str] = (EMPTY, NOTHING)
        self._manifests: dict[int, VersionManifest] = {}
        self._fetches: dict[tuple[int, str], _Fetch] = {}
        self._one_at_a_time = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._asked = 0.0
        self._news = asyncio.Event()
        self._tidied = False
        self.transfers: deque[Transfer] = deque(maxlen=_KEPT)

    # ------------------------------------------------------------ line and manifests

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        """Return the line without a round trip after the first call: a request for the next line always waits at the
        server."""
        end = self._clock.monotonic() + wait
        while True:
            self._asked = self._clock.monotonic()
            following, news = await self._followed(), self._news
            left = end - self._clock.monotonic()
            if self._known[0] != known or left <= 0:
                return self._known[0]
            told = asyncio.ensure_future(news.wait())
            try:
                await asyncio.wait({told, following}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
            if following.done() and (error := following.exception()) is not None:
                raise error

    async def _followed(self) -> asyncio.Task[None]:
        """Return the task that follows the line, one for all callers."""
        async with self._one_at_a_time:
            if self._following is None or self._following.done():
                await self._ask_line(0.0)
                self._following = asyncio.create_task(self._follow(), name="follow-line")
                # Retrieve the exception, or asyncio would log it.
                self._following.add_done_callback(lambda task: task.cancelled() or task.exception())
            return self._following

    async def _follow(self) -> None:
        """Follow the line while there are callers, until the servers fail: the next caller gets the error."""
        while self._clock.monotonic() - self._asked < _FOLLOWED:
            await self._ask_line(_WAIT)
            await asyncio.sleep(_LEAST_PAUSE)  # some servers answer at once

    async def _ask_line(self, wait: float) -> None:
        line, tag = self._known
        try:
            answer = await self._mirrors.get(f"{self._path}/line?known={quote(tag)}&wait={wait:.3f}", wait)
        except NotThere:
            self._known = (EMPTY, NOTHING)
            return
        if answer.status != 304:
            line = self._mirrors.read(answer, lambda data, what: parse_line(data, self._key, what))
            self._known = (line, answer.tag)
            self._news.set()
            self._news = asyncio.Event()
        if not self._tidied:
            self._tidied = True
            await asyncio.to_thread(self._tidy, line)

    async def manifest(self, version: int) -> VersionManifest:
        found, listed = self._manifests.get(version), self._known[0].entries.get(version)
        if found is None or (listed is not None and listed != found.entry):  # the version may have been rewritten
            answer = await self._mirrors.get(f"{self._path}/{version}/{MANIFEST}")
            found = self._mirrors.read(answer, lambda data, what: parse_manifest(data, version, self._key, what))
            while len(self._manifests) >= _MANIFESTS:
                self._manifests.pop(min(self._manifests))
            self._manifests[version] = found
        return found

    # ------------------------------------------------------------ files

    async def file(self, version: int, name: str) -> Path:
        facts = (await self.manifest(version)).files.get(name)
        if facts is None:
            raise WeightsError(f"version {version} has no file {name!r}", "look at its manifest")
        key = (version, name)
        while (fetch := self._fetches.get(key)) is not None and fetch.task.cancelling():
            await self._end(key, fetch)
        if fetch is None:
            fetch = self._fetches[key] = _Fetch(asyncio.create_task(self._have(version, name, facts)))
        fetch.waiting += 1
        try:
            # A cancelled caller does not cancel the download for others.
            return await asyncio.shield(fetch.task)
        except CorruptData:
            self._manifests.pop(version, None)  # the version may have been rewritten
            raise
        finally:
            fetch.waiting -= 1
            if not fetch.waiting and not fetch.fetched:
                fetch.task.cancel()
                await self._end(key, fetch)

    async def _end(self, key: tuple[int, str], fetch: _Fetch) -> None:
        """Wait until a cancelled download has closed its file, and forget it."""
        await asyncio.wait({fetch.task})
        if self._fetches.get(key) is fetch:
            del self._fetches[key]

    async def _have(self, version: int, name: str, facts: FileFacts) -> Path:
        path = self._cache.folder / folder_name(version) / name
        self._cache.take(path)
        try:
            if not await asyncio.to_thread(is_whole, path, facts):
                await self._fetch(version, path, facts)
        except BaseException:
            self._cache.leave(path)
            raise
        return path

    async def _fetch(self, version: int, path: Path, facts: FileFacts) -> None:
        begun = self._clock.monotonic()
        await asyncio.to_thread(self._cache.make_room, path, facts.size)
        part = PartFile(path, facts)
        try:
            download = Download(
                part,
                self._mirrors,
                f"{self._path}/{version}/{path.name}",
                streams=self._streams,
                patience=self._patience,
                stall=self._stall,
                clock=self._clock,
            )
            await download.run()
        finally:
            part.close()
        seconds = self._clock.monotonic() - begun
        self.transfers.append(Transfer(version, path.name, download.bytes, seconds, download.retries, download.givers))

    async def forget(self, version: int) -> None:
        for key in [key for key in self._fetches if key[0] == version]:
            fetch = self._fetches.pop(key)
            fetch.task.cancel()
            await asyncio.wait({fetch.task})
            if fetch.fetched:
                self._cache.leave(fetch.task.result())
        self._manifests.pop(version, None)
        await asyncio.to_thread(self._cache.remove, self._cache.folder / folder_name(version))

    def _tidy(self, line: Line) -> None:
        """Remove files of an earlier process whose versions are no longer in the line."""
        if self._cache.folder.is_dir():
            listed = {folder_name(version) for version in line.entries}
            for folder in self._cache.folder.iterdir():
                if folder.name not in listed:
                    self._cache.remove(folder)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [fetch.task for fetch in self._fetches.values()]
        tasks += [self._following] if self._following is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._mirrors.close()


@dataclass(slots=True, eq=False)
class _Fetch:
    task: asyncio.Task[Path]
    waiting: int = 0

    @property
    def fetched(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None
