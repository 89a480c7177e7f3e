"""Pulls the newest weights, from the version that a node holds, by the cheapest route, while its engine samples.

For an engine that decodes deltas itself, the deltas from its version to the head are only fetched; for one that adds
adapters to the base that it holds, only the adapter is read. The node's own copy then stays at its version until a pull
needs whole weights.

Invariants: a pull returns the head of the line, whole and verified, or deltas in verified files, or raises an error; a
node holds a whole version, or nothing. A new route is planned from the newest line if a file on the route is missing or
damaged, or if the head was orphaned meanwhile. A damaged or missing file is avoided for a while: there may be a route
without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec.structs import replace

from rillflow.contracts import Clock, Deltas, Patch, SystemClock
from rillflow.errors import ConfigError, CorruptData, RillflowError, WeightsError
from rillflow.weights.codec import Adapter, merged, read_version
from rillflow.weights.manifest import Entry, Line, Mode, Route, VersionManifest, WeightSource, route
from rillflow.weights.node_weights import NodeWeights, Step
from rillflow.wire import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from rillflow.contracts import Tensors
    from rillflow.types import Probe

log = logging.getLogger(__name__)

AVOID_SECONDS = 10.0  # before a damaged or missing file is asked for again
_PLANS = 8  # routes that a pull tries before it fails
_AT_ONCE = 8  # files fetched concurrently: a distant source takes longer to answer than to send a delta
_ROOT = 0  # the version that every engine starts with: the model's own weights

Kind = Literal["delta", "full"]
Announce = Callable[[int], AbstractAsyncContextManager[None]]


class _Step(NamedTuple):
    """One step of a route: a whole version, or a delta."""

    version: int
    kind: Kind


class Transfer(NamedTuple):
    """Measurements of one pull; kind `held` if nothing had to be fetched.

    Seconds: `fetch` of the download, `verify` of decoding, verifying and copying on the host, `apply` of the engine's
    patch or load, `pause` of the part of it without a token. With `by_engine` the engine decodes the deltas or adds the
    adapter: that is part of `apply`, and `verify` is 0.
    """

    version: int
    base: int | None
    kind: Literal["full", "delta", "adapter", "held"]
    versions: int
    bytes: int
    fetch: float
    verify: float
    apply: float = 0.0
    pause: float = 0.0
    by_engine: bool = False

    def __str__(self) -> str:
        how = "added" if self.kind == "adapter" else "decoded"
        where = f", {how} by the engine" if self.by_engine else ""
        return (
            f"version {self.version}, {self.kind}, {self.bytes} bytes{where}: fetched in {self.fetch:.3f} s, "
            f"verified in {self.verify:.3f} s, applied in {self.apply:.3f} s, {self.pause:.3f} s of them without a "
            "token"
        )


class Pulled(NamedTuple):
    """A whole version and, if it came by deltas alone, the changes. Valid until the next pull.

    An engine must reproduce `probe`. With `deltas`, which the engine decodes, or an `adapter` of the version
    `transfer.base`, which it adds, there are neither tensors nor a patch.
    """

    version: int
    tensors: Tensors
    patch: Patch | None
    transfer: Transfer
    probe: Probe | None = None
    deltas: Deltas | None = None
    adapter: Adapter | None = None


class _RouteFailed(Exception):
    """A route failed, because of `step` if that is given; another route may work."""

    def __init__(self, cause: RillflowError, step: _Step | None = None) -> None:
        super().__init__(str(cause))
        self.cause, self.step = cause, step


class _Found(NamedTuple):
    """The files of one step."""

    manifest: VersionManifest
    paths: Mapping[str, Path]


class _Ready(NamedTuple):
    """All files of a route, and the seconds that fetching them took."""

    found: Mapping[int, _Found]
    seconds: float


class Puller:
    """Pulls the weights of one policy on one node, one pull at a time.

    `initial` returns the model's own weights: if they are the root of the line, a new node need not fetch it.
    `announce` is entered around a route that does not start from the version that the node serves: the announcement
    keeps the version in the store.
    """

    def __init__(
        self,
        source: WeightSource,
        mode: Mode = "auto",
        *,
        initial: Callable[[], Tensors] | None = None,
        announce: Announce | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._announce = announce
        self._mode: Mode = mode
        self._initial = initial
        self._clock = clock or SystemClock()
        self._held = NodeWeights()
        self._behind = False  # whether the engine has received deltas that this copy has not
        self._line: Line | None = None
        self._avoid: dict[_Step, float] = {}
        self._fetched: set[int] = set()

    async def head(self) -> int | None:
        """Return the head of the source's line."""
        self._line = await self._source.line()
        return self._line.head

    async def changed(self, seconds: float) -> None:
        """Wait until the line changes, at most `seconds`."""
        self._line = await self._source.line(self._line, seconds)

    async def probe(self, version: int) -> Probe | None:
        """Return the probe of a version, or None. WeightsError if the version no longer exists."""
        return (await self._source.manifest(version)).probe

    async def close(self) -> None:
        await self._source.close()

    async def pull(self, serves: int | None = None, base: int | None = None) -> Pulled:
        """Pull the head: as deltas, if they lead to it from `serves`, the version of an engine that decodes deltas; as
        an adapter, if it is one of `base`, the weights of an engine that adds adapters.

        CorruptData or WeightsError if no route leads to it now; WireError if no source answers.
        """
        cause: RillflowError | None = None
        for _ in range(_PLANS):
            line = self._line = await self._source.line()
            try:
                return await self._reach(line, serves, base)
            except _RouteFailed as failed:
                cause = failed.cause
                await self._note(failed)
            except (WeightsError, CorruptData) as error:
                if await self._source.line() == line:
                    raise cause or error from error  # no route is left: the first cause says more
                cause = error
            log.info("planning another route to version %s: %s", line.head, cause)
        raise WeightsError(f"no route to the newest version worked: {cause}", "is the source damaged?") from cause

    # ------------------------------------------------------------ one route

    async def _reach(self, line: Line, serves: int | None, base: int | None) -> Pulled:
        if line.head is None:
            raise WeightsError("no version was published yet", "the trainer publishes version 0 when it starts")
        manifest = await self._source.manifest(line.head)
        direct = self._direct(line, line.head, serves) if serves is not None and manifest.adapter is None else None
        if direct is not None and serves is not None and manifest.fingerprints:
            return await self._deltas(line, manifest, direct, serves)
        if base is not None and manifest.adapter is not None and manifest.adapter.base == base:
            return await self._adapter(manifest, base)
        way = await self._plan(line, line.head if manifest.adapter is None else manifest.adapter.base)
        announce = self._announce if way.snapshot is not None or self._behind else None
        async with nullcontext() if announce is None else announce(line.head):
            return await self._go(line, line.head, manifest, way)

    async def _go(self, line: Line, head: int, manifest: VersionManifest, way: Route) -> Pulled:
        adapter = await self._files(head, "full") if manifest.adapter is not None else None
        found, fetch = await self._ready(line, head, way)
        began = time.perf_counter()
        patch = await in_thread(lambda: self._take(way, found))
        tensors: Tensors = self._held.tensors
        if adapter is not None:
            tensors = await in_thread(lambda: self._merge(adapter))
        verify = time.perf_counter() - began
        self._behind = False
        await self._forget()
        size = way.bytes + sum(facts.size for facts in manifest.full_files.values() if adapter is not None)
        kind: Literal["full", "delta", "held"]
        kind = "full" if way.snapshot is not None or adapter is not None else "delta" if way.deltas else "held"
        patch = patch if kind == "delta" else None
        base = None if patch is None else patch.base
        transfer = Transfer(head, base, kind, len(way.deltas), size, fetch, verify)
        return Pulled(head, tensors, patch, transfer, manifest.probe)

    def _direct(self, line: Line, head: int, serves: int) -> Route | None:
        """Return the route of deltas from the engine's version to the head, if that is the best one."""
        try:
            way = route(self._usable(line.entries), serves, head, self._mode)
        except WeightsError:
            return None
        return way if way.snapshot is None and way.deltas else None

    async def _deltas(self, line: Line, manifest: VersionManifest, way: Route, serves: int) -> Pulled:
        """Fetch deltas for an engine that decodes them. Their files stay until the next pull."""
        head = manifest.version
        found, fetch = await self._ready(line, head, way)
        self._behind = True
        await self._forget(keep=way.deltas)
        steps = [list(found[version].paths.values()) for version in way.deltas]
        transfer = Transfer(head, serves, "delta", len(way.deltas), way.bytes, fetch, 0.0, by_engine=True)
        deltas = Deltas(serves, steps, manifest.tensor_fingerprints())
        return Pulled(head, {}, None, transfer, manifest.probe, deltas)

    async def _adapter(self, manifest: VersionManifest, base: int) -> Pulled:
        """Read the adapter for an engine that holds its base."""
        head, began = manifest.version, time.perf_counter()
        found = await self._files(head, "full")
        fetch = time.perf_counter() - began
        await self._refuse_orphaned(head)
        adapter = await in_thread(lambda: _adapter_of(found))
        await self._forget()
        size = sum(facts.size for facts in manifest.full_files.values())
        transfer = Transfer(head, base, "adapter", 1, size, fetch, 0.0, by_engine=True)
        return Pulled(head, {}, None, transfer, manifest.probe, adapter=adapter)

    async def _plan(self, line: Line, want: int) -> Route:
        """Plan the route to `want`. A new node may find that it holds the root already."""
        entries = self._usable(line.entries)
        await self._begin_at_the_root(entries, want)
        return route(entries, self._held.version, want, self._mode)

    async def _ready(self, line: Line, head: int, way: Route) -> _Ready:
        """Fetch the files of a route. The held weights do not change yet."""
        began = time.perf_counter()
        steps = [_Step(version, "delta") for version in way.deltas]
        if way.snapshot is not None:
            steps.insert(0, _Step(way.snapshot, "full"))
        found = await self._fetch(steps)
        seconds = time.perf_counter() - began
        await self._refuse_orphaned(head)
        return _Ready({one.manifest.version: one for one in found}, seconds)

    async def _refuse_orphaned(self, head: int) -> None:
        if head in (await self._source.line()).orphaned:
            raise _RouteFailed(WeightsError(f"version {head} was orphaned while it was fetched"))

    def _usable(self, entries: Mapping[int, Entry]) -> dict[int, Entry]:
        """Return the line's entries without the files that are avoided now."""
        now = self._clock.monotonic()
        self._avoid = {step: until for step, until in self._avoid.items() if until > now}
        usable = dict(entries)
        for version, kind in self._avoid:
            if version in usable:
                nothing = {"delta_bytes": 0} if kind == "delta" else {"full_bytes": 0}
                usable[version] = replace(usable[version], **nothing)
        return usable

    async def _begin_at_the_root(self, entries: Mapping[int, Entry], want: int) -> None:
        """Hold the model's own weights, if they are the root of the line and lead to `want`."""
        if self._initial is None or self._held.version is not None:
            return
        try:
            if route(entries, _ROOT, want, self._mode).snapshot is not None:
                return
            manifest = await self._source.manifest(_ROOT)
            initial, self._initial = self._initial, None
            if manifest.fingerprints:
                await in_thread(lambda: self._held.replace(initial(), manifest))
        except (WeightsError, CorruptData, ConfigError) as error:
            log.info("the model's own weights are not used as version %d: %s", _ROOT, error)

    # ------------------------------------------------------------ files

    async def _fetch(self, steps: Sequence[_Step]) -> list[_Found]:
        """Fetch the files of all steps, several at once."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def fetch(step: _Step) -> _Found:
            async with gate:
                return await self._files(*step)

        tasks = [asyncio.ensure_future(fetch(step)) for step in steps]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _files(self, version: int, kind: Kind) -> _Found:
        self._fetched.add(version)
        with _failing(_Step(version, kind)):
            manifest = await self._source.manifest(version)
            names = manifest.delta_files if kind == "delta" else manifest.full_files
            if not names:
                raise WeightsError(f"version {version} has no {kind} files any more", "look at the line again")
            return _Found(manifest, {name: await self._source.file(version, name) for name in names})

    async def _note(self, failed: _RouteFailed) -> None:
        if failed.step is not None:
            self._avoid[failed.step] = self._clock.monotonic() + AVOID_SECONDS
            await self._source.forget(failed.step.version)

    async def _forget(self, keep: Collection[int] = ()) -> None:
        """Release fetched files after a successful pull. After a failed one the next pull may use them."""
        for version in self._fetched - set(keep):
            self._fetched.discard(version)
            await self._source.forget(version)

    # ------------------------------------------------------------ slow work, in threads

    def _take(self, way: Route, found: Mapping[int, _Found]) -> Patch | None:
        if way.snapshot is not None:
            with _failing(_Step(way.snapshot, "full")):
                self._held.forget()  # to avoid two whole copies in memory
                self._held.replace(read_version(*found[way.snapshot]), found[way.snapshot].manifest, verified=True)
        if not way.deltas:
            return None
        try:
            steps = [found[version] for version in way.deltas]
            return self._held.advance([Step(manifest, list(paths.values())) for manifest, paths in steps])
        except (CorruptData, WeightsError) as error:
            # The steps before the bad one have been applied, so it is the first one after the held version.
            at = self._held.version
            bad = next((one for one in steps if at is None or one.manifest.version > at), steps[-1])
            if way.snapshot is None and all(path.exists() for path in bad.paths.values()):
                # The file has its hash, so the held weights are not what the line says. Start with a whole version.
                self._held.forget()
                raise _RouteFailed(error) from error
            raise _RouteFailed(error, _Step(bad.manifest.version, "delta")) from error

    def _merge(self, found: _Found) -> dict[str, torch.Tensor]:
        """Merge an adapter into the held version, which is the base of all adapters of the policy."""
        with _failing(_Step(found.manifest.version, "full")):
            return merged(self._held.tensors, _adapter_of(found))


def _adapter_of(found: _Found) -> Adapter:
    facts = found.manifest.adapter
    assert facts is not None
    with _failing(_Step(found.manifest.version, "full")):
        return Adapter(read_version(*found), facts.rank, facts.alpha)


@contextmanager
def _failing(step: _Step) -> Iterator[None]:
    """Turn errors into _RouteFailed of this step. A file may be removed while it is read."""
    try:
        yield
    except (CorruptData, WeightsError) as error:
        raise _RouteFailed(error, step) from error
    except OSError as error:
        raise _RouteFailed(CorruptData(f"version {step.version} cannot be read: {error}"), step) from error
