"""A relay: serves the routes of a weight server from a cache that it fills from upstream on demand.

Invariants: a file is fetched from upstream once, however many readers ask for it, and is sent to them as it arrives; it
gets its name in the cache only after its hash was verified. The cache stays below its bound and keeps files that are
being read. While upstream is away the relay serves its files and the last known line, and says so in a header. It needs
no key: its readers check signatures and hashes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import CorruptData, QueueFull, RillflowError, Unavailable
from rillflow.storage import file_hash, write_atomic
from rillflow.weights.manifest import VersionManifest, folder_name, parse_manifest
from rillflow.weights.sealed import MANIFEST, FileFacts
from rillflow.weights.transport.cache import FileCache, PartFile
from rillflow.weights.transport.download import PATIENCE, Download
from rillflow.weights.transport.following import Follower
from rillflow.weights.transport.mirrors import STALL_SECONDS, Mirrors, NotThere
from rillflow.weights.transport.serve import BLOCK, DiskFile, OpenFile, Told, WeightService, absent, checked
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

STREAMS = 8
POLICIES = 64
FLIGHTS = 64
ABANDONED = 30.0  # seconds without a reader after which a download stops
# Streams turn to the bytes that readers wait for after at most this many bytes.
_MOST_PIECE = 32 << 20


@dataclass(slots=True, eq=False)
class _Flight:
    """A file that is being fetched or has just arrived, and its readers."""

    part: PartFile
    download: Download
    task: asyncio.Task[None] | None = None
    readers: int = 0
    ended: bool = False
    failed: bool = False
    leaving: asyncio.TimerHandle | None = None


class RelayShelf:
    """A shelf of files from upstream. `limit` bounds the bytes in `cache`."""

    def __init__(
        self,
        upstream: Sequence[str],
        token: str,
        cache: Path,
        limit: int | None = None,
        *,
        streams: int = STREAMS,
        patience: float = PATIENCE,
        stall: float = STALL_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._mirrors = Mirrors(upstream, token, clock=self._clock, stall=stall)
        self._cache = FileCache(cache, limit)
        self._streams, self._patience, self._stall = streams, patience, stall
        self._followers: dict[str, Follower] = {}
        self._manifests: dict[Path, asyncio.Task[bytes]] = {}
        self._flights: dict[Path, _Flight] = {}
        self._checks: dict[Path, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._fetched = 0

    @property
    def fetched(self) -> int:
        """Return the bytes of files that came from upstream."""
        return self._fetched + sum(flight.download.bytes for flight in self._flights.values() if not flight.ended)

    # ------------------------------------------------------------ the line

    async def line(self, policy: str, known: str, wait: float) -> Told:
        policy = checked(policy)
        follower = self._followers.get(policy)
        if follower is None or follower.ended:
            self._followers = {name: one for name, one in self._followers.items() if not one.ended}
            if len(self._followers) >= POLICIES:
                raise QueueFull(f"this relay follows {POLICIES} policies already", "start another relay for more")
            kept = self._cache.folder / policy / "line.json"
            self._cache.take(kept)
            follower = self._followers[policy] = Follower(self._mirrors, policy, kept, self._clock)
        return await follower.line(known, wait)

    # ------------------------------------------------------------ manifests

    async def manifest(self, policy: str, version: int) -> bytes:
        path = self._cache.folder / checked(policy) / folder_name(version) / MANIFEST
        with self._cache.used(path):
            if path not in self._manifests:
                task = self._manifests[path] = asyncio.create_task(self._get_manifest(path, policy, version))
                task.add_done_callback(lambda _: self._manifests.pop(path))
            return await asyncio.shield(self._manifests[path])

    async def _get_manifest(self, path: Path, policy: str, version: int) -> bytes:
        kept = await asyncio.to_thread(_read, path, version)
        follower = self._followers.get(policy)
        listed = None if follower is None else follower.entry(version)
        if kept is not None and listed in (None, _parsed(kept, version).entry):
            return kept
        try:
            answer = await self._mirrors.get(f"/weights/{policy}/{version}/{MANIFEST}")
        except NotThere as error:
            raise absent(f"version {version} of {policy}") from error
        except Unavailable:
            if kept is None:
                raise
            return kept
        self._mirrors.read(answer, lambda data, what: parse_manifest(data, version, b"", what))
        if kept is not None and kept != answer.data:  # the version was written again
            await asyncio.to_thread(self._cache.remove, path.parent)
            self._checks = {of: check for of, check in self._checks.items() if of.parent != path.parent}
        await asyncio.to_thread(_write, path, answer.data)
        return answer.data

    async def _facts(self, policy: str, version: int, name: str) -> FileFacts:
        facts = _parsed(await self.manifest(policy, version), version).files.get(name)
        if facts is None:
            raise absent(f"{name} in version {version} of {policy}")
        return facts

    # ------------------------------------------------------------ files

    async def open(self, policy: str, version: int, name: str) -> OpenFile:
        facts = await self._facts(checked(policy), version, checked(name))
        path = self._cache.folder / policy / folder_name(version) / name
        self._cache.take(path)
        try:
            async with self._one_at_a_time:
                flight = self._flights.get(path)
                if flight is None or flight.failed:
                    kept = await asyncio.to_thread(_kept, path, facts.size)
                    if kept is not None:
                        self._check_once(path, facts)
                        return _KeptFile(kept, facts, lambda: self._cache.leave(path))
                    flight = await self._start(path, facts, f"/weights/{policy}/{version}/{name}")
        except BaseException:
            self._cache.leave(path)
            raise
        self._enter(flight)
        return _ComingFile(flight, lambda: self._leave(path, flight))

    async def _start(self, path: Path, facts: FileFacts, source: str) -> _Flight:
        if len(self._flights) >= FLIGHTS:
            raise QueueFull(f"this relay fetches {FLIGHTS} files already", "try again later")
        await asyncio.to_thread(self._cache.make_room, path, facts.size)
        part = PartFile(path, facts)
        download = Download(
            part,
            self._mirrors,
            source,
            streams=self._streams,
            most_piece=_MOST_PIECE,
            patience=self._patience,
            stall=self._stall,
            clock=self._clock,
        )
        flight = self._flights[path] = _Flight(part, download)
        self._cache.take(path)
        flight.task = asyncio.create_task(self._fly(path, flight), name=f"relay-{path.name}")
        return flight

    async def _fly(self, path: Path, flight: _Flight) -> None:
        try:
            await flight.download.run()
        except RillflowError as error:
            flight.failed = True
            log.warning("%s was not fetched: %s", path, error)
            if isinstance(error, CorruptData):  # the version may have been written again
                path.with_name(MANIFEST).unlink(missing_ok=True)
        except BaseException:
            flight.failed = True
            raise
        finally:
            flight.ended = True
            self._fetched += flight.download.bytes
            self._end(path, flight)

    def _enter(self, flight: _Flight) -> None:
        flight.readers += 1
        if flight.leaving is not None:
            flight.leaving.cancel()
            flight.leaving = None

    def _leave(self, path: Path, flight: _Flight) -> None:
        self._cache.leave(path)
        flight.readers -= 1
        if not flight.readers and not flight.ended and flight.task is not None:
            flight.leaving = asyncio.get_running_loop().call_later(ABANDONED, flight.task.cancel)
        self._end(path, flight)

    def _end(self, path: Path, flight: _Flight) -> None:
        """Close a flight that has ended, after its last reader has left."""
        if flight.ended and not flight.readers:
            flight.part.close()
            self._cache.leave(path)
            if self._flights.get(path) is flight:
                del self._flights[path]

    def _check_once(self, path: Path, facts: FileFacts) -> None:
        """Check a file of an earlier process once. It is served at once, and removed if the disk has damaged it."""

        async def check() -> None:
            if await asyncio.to_thread(file_hash, path) != facts.sha256:
                log.error("%s is damaged and will be fetched again", path)
                path.unlink(missing_ok=True)

        if path not in self._checks:
            self._checks[path] = asyncio.create_task(check(), name=f"check-{path.name}")

    async def close(self) -> None:
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        tasks += self._checks.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(follower.close() for follower in self._followers.values()))
        await self._mirrors.close()


class _KeptFile(DiskFile):
    def __init__(self, at: int, facts: FileFacts, on_close: Callable[[], None]) -> None:
        super().__init__(at, asyncio.to_thread)
        self.tag = facts.sha256[:32]
        self._on_close = on_close

    def close(self) -> None:
        super().close()
        self._on_close()


class _ComingFile:
    """A file that is read while it arrives."""

    def __init__(self, flight: _Flight, on_close: Callable[[], None]) -> None:
        self.size = flight.part.facts.size
        self.tag = flight.part.facts.sha256[:32]
        self._flight = flight
        self.close = on_close

    async def blocks(self, start: int, end: int) -> AsyncGenerator[bytes]:
        while start < end:
            reach = min(await self._flight.download.wait_for(start), start + BLOCK, end)
            data = await asyncio.to_thread(self._flight.part.read, start, reach - start)
            start += len(data)
            yield data


def _kept(path: Path, size: int) -> int | None:
    """Return a descriptor of the file, or None if it is not in the cache."""
    try:
        at = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(at).st_size == size:
        return at
    os.close(at)
    path.unlink(missing_ok=True)
    return None


def _parsed(data: bytes, version: int) -> VersionManifest:
    return parse_manifest(data, version, b"", f"the manifest of version {version}")


def _read(path: Path, version: int) -> bytes | None:
    try:
        data = path.read_bytes()
        _parsed(data, version)
    except (FileNotFoundError, CorruptData):
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


class RelayService(WeightService):
    def __init__(self, shelf: RelayShelf, token: str) -> None:
        super().__init__(shelf, Keyring.of_reader(token), name="relay")
        self.gauge("rillflow_relay_fetched_bytes", "Bytes of files from upstream", lambda: shelf.fetched)


async def serve_relay(
    upstream: Sequence[str],
    cache: Path,
    token: str,
    *,
    on_ready: Callable[[str], None],
    limit: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Serve until cancelled. `token` is the run's reader token, for both sides."""
    service = RelayService(RelayShelf(upstream, token, cache, limit), token)
    on_ready(await service.start(host, port))
    try:
        await asyncio.Event().wait()
    finally:
        await service.stop()
