"""From the weights that a node holds to the newest ones, by the cheapest way, while its engine goes on sampling.

For an engine that decodes deltas by itself, deltas that lead from the version it serves to the head are only fetched.
The node's own copy then stays where it is. Only a pull that needs whole weights moves it on.

Invariants: what is pulled is the head of the line, whole and verified, or deltas whose files are verified, or an error
is raised; what is held is a whole version, or nothing. The way is planned anew, from the newest line, when a file on it
is gone or damaged, and when the head was orphaned meanwhile. A damaged or lost file is not asked for again for a while:
there may be a way without it.
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
from rillflow.weights.adapters import Adapter, merged
from rillflow.weights.codec import read_version
from rillflow.weights.held import Held, Step
from rillflow.weights.manifest import Entry, Line, VersionManifest
from rillflow.weights.route import Mode, Route, route
from rillflow.weights.source import WeightSource
from rillflow.wire import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from rillflow.contracts import Tensors
    from rillflow.types import Probe

log = logging.getLogger(__name__)

AVOID_SECONDS = 10.0  # before a file that was damaged or gone is asked for again
_PLANS = 8  # before a pull is given up: every one was spoilt by something else
_AT_ONCE = 8  # files on the way: a far source takes longer to answer than to send a delta
_ROOT = 0  # what every engine has when it starts: the model's own weights

Kind = Literal["delta", "full"]
Word = Callable[[int], AbstractAsyncContextManager[None]]


class _Step(NamedTuple):
    """One step of a way: a version whole, or what changes another one into it."""

    version: int
    kind: Kind


class Transfer(NamedTuple):
    """One pull; kind `held` if nothing had to be fetched. Seconds: `fetch` of the download, `verify` until it was
    decoded, verified and in the host's copy, `apply` of the engine's patch or load, `pause` of that without a token.
    With `by_engine` the engine decodes the deltas: then that is part of `apply`, and `verify` is 0."""

    version: int
    base: int | None
    kind: Literal["full", "delta", "held"]
    versions: int
    bytes: int
    fetch: float
    verify: float
    apply: float = 0.0
    pause: float = 0.0
    by_engine: bool = False

    def __str__(self) -> str:
        where = ", decoded by the engine" if self.by_engine else ""
        return (
            f"version {self.version}, {self.kind}, {self.bytes} bytes{where}: fetched in {self.fetch:.3f} s, "
            f"verified in {self.verify:.3f} s, applied in {self.apply:.3f} s, {self.pause:.3f} s of them without a "
            "token"
        )


class Pulled(NamedTuple):
    """A version, whole; and, where it came by deltas alone, what has changed. Good until the next pull. `probe` is what
    an engine must reproduce of it. With `deltas`, which the engine decodes, there are neither tensors nor a patch."""

    version: int
    tensors: Tensors
    patch: Patch | None
    transfer: Transfer
    probe: Probe | None = None
    deltas: Deltas | None = None


class _Spoilt(Exception):
    """The way is no good, because of one of its steps if that is named; another one may be."""

    def __init__(self, cause: RillflowError, step: _Step | None = None) -> None:
        super().__init__(str(cause))
        self.cause, self.step = cause, step


class _Found(NamedTuple):
    """The files of one step of the way."""

    manifest: VersionManifest
    paths: Mapping[str, Path]


class _Ready(NamedTuple):
    """All files of a way, and the seconds that this took."""

    found: Mapping[int, _Found]
    seconds: float


class Puller:
    """Of one policy, on one node. `initial` gives the model's own weights: where they are the root of the line, a new
    node need not fetch it. `word` is entered around the way to a version that nothing keeps in the store for this node:
    one that does not begin with what it serves. One pull at a time."""

    def __init__(
        self,
        source: WeightSource,
        mode: Mode = "auto",
        *,
        initial: Callable[[], Tensors] | None = None,
        word: Word | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._word = word
        self._mode: Mode = mode
        self._initial = initial
        self._clock = clock or SystemClock()
        self._held = Held()
        self._behind = False  # whether the engine has been given deltas that the copy here has not
        self._line: Line | None = None
        self._avoid: dict[_Step, float] = {}
        self._fetched: set[int] = set()

    async def head(self) -> int | None:
        """The version to be on, as the source says now."""
        self._line = await self._source.line()
        return self._line.head

    async def changed(self, seconds: float) -> None:
        """Returns once the line is another than at the last look, or after so many seconds."""
        self._line = await self._source.line(self._line, seconds)

    async def probe(self, version: int) -> Probe | None:
        """That of a version; None if it has none. WeightsError if the version is not there any more."""
        return (await self._source.manifest(version)).probe

    async def close(self) -> None:
        await self._source.close()

    async def pull(self, serves: int | None = None) -> Pulled:
        """The head; as deltas, where they lead to it from `serves`, the version of an engine that decodes them by
        itself. CorruptData or WeightsError when there is no way to it now; WireError when nobody can be asked."""
        cause: RillflowError | None = None
        for _ in range(_PLANS):
            line = self._line = await self._source.line()
            try:
                return await self._reach(line, serves)
            except _Spoilt as spoilt:
                cause = spoilt.cause
                await self._note(spoilt)
            except (WeightsError, CorruptData) as error:
                if await self._source.line() == line:
                    raise cause or error from error  # there is no way: what has spoilt the others says more
                cause = error
            log.info("the way to version %s is planned anew: %s", line.head, cause)
        raise WeightsError(f"no way to the newest version was good: {cause}", "is the source damaged?") from cause

    # ------------------------------------------------------------ one plan

    async def _reach(self, line: Line, serves: int | None) -> Pulled:
        if line.head is None:
            raise WeightsError("no version was published yet", "the trainer publishes version 0 when it starts")
        manifest = await self._source.manifest(line.head)
        direct = self._direct(line, line.head, serves) if serves is not None and manifest.adapter is None else None
        if direct is not None and serves is not None and manifest.fingerprints:
            return await self._deltas(line, manifest, direct, serves)
        way = await self._plan(line, line.head if manifest.adapter is None else manifest.adapter.base)
        word = self._word if way.snapshot is not None or self._behind else None
        async with nullcontext() if word is None else word(line.head):
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
        """Return the way of deltas from the engine's version to the head, if that is the best way."""
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

    async def _plan(self, line: Line, want: int) -> Route:
        """A new node may find that it holds the root already."""
        entries = self._usable(line.entries)
        await self._begin_at_the_root(entries, want)
        return route(entries, self._held.version, want, self._mode)

    async def _ready(self, line: Line, head: int, way: Route) -> _Ready:
        """What is held is not touched yet."""
        began = time.perf_counter()
        steps = [_Step(version, "delta") for version in way.deltas]
        if way.snapshot is not None:
            steps.insert(0, _Step(way.snapshot, "full"))
        found = await self._fetch(steps)
        seconds = time.perf_counter() - began
        if head in (await self._source.line()).orphaned:
            raise _Spoilt(WeightsError(f"version {head} was orphaned while it was fetched"))
        return _Ready({one.manifest.version: one for one in found}, seconds)

    def _usable(self, entries: Mapping[int, Entry]) -> dict[int, Entry]:
        """What the line offers, without what is avoided at present."""
        now = self._clock.monotonic()
        self._avoid = {step: until for step, until in self._avoid.items() if until > now}
        usable = dict(entries)
        for version, kind in self._avoid:
            if version in usable:
                nothing = {"delta_bytes": 0} if kind == "delta" else {"full_bytes": 0}
                usable[version] = replace(usable[version], **nothing)
        return usable

    async def _begin_at_the_root(self, entries: Mapping[int, Entry], want: int) -> None:
        """Hold the model's own weights, where they are what was published first and lead to `want`."""
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
            log.info("the model's own weights are not taken for version %d: %s", _ROOT, error)

    # ------------------------------------------------------------ files

    async def _fetch(self, steps: Sequence[_Step]) -> list[_Found]:
        """The files of all steps, several at once."""
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
        with _blaming(_Step(version, kind)):
            manifest = await self._source.manifest(version)
            names = manifest.delta_files if kind == "delta" else manifest.full_files
            if not names:
                raise WeightsError(f"version {version} has no {kind} files any more", "look at the line again")
            return _Found(manifest, {name: await self._source.file(version, name) for name in names})

    async def _note(self, spoilt: _Spoilt) -> None:
        if spoilt.step is not None:
            self._avoid[spoilt.step] = self._clock.monotonic() + AVOID_SECONDS
            await self._source.forget(spoilt.step.version)

    async def _forget(self, keep: Collection[int] = ()) -> None:
        """Files stay while a pull that failed may go on with them."""
        for version in self._fetched - set(keep):
            self._fetched.discard(version)
            await self._source.forget(version)

    # ------------------------------------------------------------ in threads: all this takes long

    def _take(self, way: Route, found: Mapping[int, _Found]) -> Patch | None:
        if way.snapshot is not None:
            with _blaming(_Step(way.snapshot, "full")):
                self._held.forget()  # not two whole copies at once
                self._held.replace(read_version(*found[way.snapshot]), found[way.snapshot].manifest, verified=True)
        if not way.deltas:
            return None
        try:
            steps = [found[version] for version in way.deltas]
            return self._held.advance([Step(manifest, list(paths.values())) for manifest, paths in steps])
        except (CorruptData, WeightsError) as error:
            # The steps before the bad one have been taken: it is the first that leads on from what is held.
            at = self._held.version
            bad = next((one for one in steps if at is None or one.manifest.version > at), steps[-1])
            if way.snapshot is None and all(path.exists() for path in bad.paths.values()):
                # The file has its hash: rather what is held is not what the line calls so. Begin with a whole version.
                self._held.forget()
                raise _Spoilt(error) from error
            raise _Spoilt(error, _Step(bad.manifest.version, "delta")) from error

    def _merge(self, found: _Found) -> dict[str, torch.Tensor]:
        """An adapter in what is held, which is the version that all adapters of the policy belong to."""
        facts = found.manifest.adapter
        assert facts is not None
        with _blaming(_Step(found.manifest.version, "full")):
            return merged(self._held.tensors, Adapter(read_version(*found), facts.rank, facts.alpha))


@contextmanager
def _blaming(step: _Step) -> Iterator[None]:
    """What goes wrong here is this step's fault. A file may be removed while it is read."""
    try:
        yield
    except (CorruptData, WeightsError) as error:
        raise _Spoilt(error, step) from error
    except OSError as error:
        raise _Spoilt(CorruptData(f"version {step.version} cannot be read: {error}"), step) from error
