"""Keeps an engine on the head of its policy's weights. A broken version is skipped, and the old one stays.

An engine that decodes deltas gets their files; any other engine gets the changes, decoded on this host. If an engine
cannot decode deltas, the log says why, and they are decoded here from then on. An engine that adds adapters to the base
that it holds gets them alone. If it does not take one, it gets merged weights, also of later versions: until it is
started again it no longer holds the base.

Invariants: the engine samples during everything but the change itself; an engine that serves another version than the
patch's base, or refuses the patch, gets the whole version. An engine that `doubts` samples only after it has reproduced
the probe of its version, also of the one that it started with. An engine that does not reproduce it gets the whole
version; if that fails too, the version is tried again after a while, or a newer one is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Protocol

from rillflow.contracts import (
    Clock,
    DecodesDeltas,
    Engine,
    SystemClock,
    TakesAdapters,
    TakesTurns,
    Turn,
    WeightStore,
)
from rillflow.errors import EngineError, EngineLost, RillflowError, WeightsError
from rillflow.storage.spans import NoSpans, Spans
from rillflow.types import Probe
from rillflow.weights.codec import Adapter
from rillflow.weights.probe import ProbeMismatch
from rillflow.weights.pull import Pulled, Transfer

log = logging.getLogger(__name__)

_KEPT = 100
# Seconds to wait for a change of the line; then the engine is checked again, which may have lost its weights.
_LOOK = 2.0
_AWAY = 1.0  # seconds between two attempts if the source does not answer
_REPEAT = 60.0  # seconds before the log repeats a complaint
_AGAIN = 10.0  # seconds before an engine gets a version again whose probe it did not reproduce
_ROOT = 0  # the version that every engine starts with
# Errors of sources, disks and engines; a shared folder may be away for a moment too.
_TROUBLE = (RillflowError, OSError)


class Supply(Protocol):
    """The supply of an engine's weights: `pull.Puller`, or `StoreSupply`."""

    async def head(self) -> int | None: ...

    async def pull(self, serves: int | None = None, base: int | None = None) -> Pulled: ...

    async def probe(self, version: int) -> Probe | None: ...

    async def changed(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


class StoreSupply:
    """A supply from a store whose versions are read whole, such as one in this process's memory."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def head(self) -> int | None:
        return self._store.head()

    async def pull(self, serves: int | None = None, base: int | None = None) -> Pulled:
        head = self._store.head()
        if head is None:
            raise WeightsError("no version was published yet", "wait for the first one")
        began = time.perf_counter()
        tensors = await asyncio.to_thread(self._store.pull, head)
        transfer = Transfer(head, None, "held", 0, 0, 0.0, time.perf_counter() - began)
        return Pulled(head, tensors, None, transfer, self._store.probe(head))

    async def probe(self, version: int) -> Probe | None:
        return self._store.probe(version)

    async def changed(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


class Transfers:
    """The last pulls, and sums over all of them."""

    def __init__(self) -> None:
        self.last: deque[Transfer] = deque(maxlen=_KEPT)
        self.loads = self.delta_loads = self.bytes = 0
        self.proven = self.refuted = 0  # probes that the engine reproduced, and those that it did not
        self.fetch = self.verify = self.apply = self.pause = 0.0

    def add(self, transfer: Transfer) -> None:
        self.last.append(transfer)
        self.loads += 1
        self.delta_loads += transfer.kind == "delta"
        self.bytes += transfer.bytes
        self.fetch += transfer.fetch
        self.verify += transfer.verify
        self.apply += transfer.apply
        self.pause += transfer.pause


class Refresher:
    """Pulls the head if it differs from the engine's version, also after a rewind to an older version.

    `turn` is entered around every change of weights, so that not all engines of a policy pause at once; not at the
    first one, when the engine serves nothing yet. An engine that takes turns itself enters it. `on_load` is called
    after each change, and `spans` record it. With `doubts` the engine samples only from proven weights. `trouble` says
    why it does not sample.
    """

    def __init__(
        self,
        policy: str,
        engine: Engine,
        supply: Supply,
        *,
        turn: Turn | None = None,
        doubts: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._supply = supply
        self._turn = turn
        self._clock = clock or SystemClock()
        self._said: dict[str, float] = {}
        self._one_at_a_time = asyncio.Lock()
        self._serving = False
        self._served = engine.version  # the last version that it is known to have
        self._refused = ""  # why the engine does not decode deltas
        self._failed: tuple[int, float] | None = None  # the version with a failed probe, and when to try it again
        self.trouble = ""
        self._waited = 0.0  # seconds for turns
        self._takes_turns = isinstance(engine, TakesTurns)
        if isinstance(engine, TakesTurns):
            engine.turn = self._changing
        if doubts:
            engine.doubt()
        self.on_load: Callable[[], None] = lambda: None
        self.spans: Spans = NoSpans()
        self.transfers = Transfers()

    async def refresh(self) -> bool:
        """Load the head if it is new; return whether a version was loaded."""
        async with self._one_at_a_time:
            head: int | None = None
            try:
                head = await self._supply.head()
                if head is None or self._rests(head) or await self._has(head):
                    return False
                return await self._give(await self._supply.pull(self._decodes_from(), self._adds_to()))
            except ProbeMismatch as error:
                await self._mistrust(error)
                return False
            except _TROUBLE as error:
                # The head may have changed while it was read. A version that is really broken stays in the log.
                self._complain("no newer version loaded" if head is None else f"version {head} not loaded", error)
                return False
            finally:
                self._serving = True

    async def _has(self, head: int) -> bool:
        """Return whether the engine serves the head already. The version that it started with is proven first."""
        if self._engine.version != head:
            return False
        if not self._engine.proven:
            try:
                await self._engine.prove(await self._supply.probe(head))
            except ProbeMismatch as error:
                log.warning("policy %s: sending version %d to the engine as a whole: %s", self._policy, head, error)
                return False
            self._note_good(head)
            self.on_load()
        return True

    async def _give(self, pulled: Pulled) -> bool:
        if await self._has(pulled.version):  # the store was rewound to it meanwhile
            return False
        began, waited, paused = time.perf_counter(), self._waited, self._engine.stats().load_seconds
        async with nullcontext() if self._takes_turns else self._changing():
            done = await self._taken(pulled)
            if not done and pulled.transfer.by_engine:
                pulled = await self._supply.pull()
            if not done and not await self._patched(pulled):
                await self._engine.load(pulled.tensors, pulled.version, pulled.probe)
        apply = time.perf_counter() - began - (self._waited - waited)
        pause = self._engine.stats().load_seconds - paused
        transfer = pulled.transfer._replace(apply=apply, pause=pause)
        self._note_good(pulled.version)
        self.transfers.add(transfer)
        log.info("policy %s: %s", self._policy, transfer)
        self.on_load()
        return True

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        began = time.perf_counter()
        async with self._turn() if self._turn is not None and self._serving else nullcontext():
            self._waited += time.perf_counter() - began
            with self.spans.doing("load"):
                yield

    def _decodes_from(self) -> int | None:
        """Return the version from which the engine decodes deltas; None if they are decoded here."""
        engine = self._engine
        if not isinstance(engine, DecodesDeltas):
            return None
        if engine.decoding_refused and not self._refused:
            self._refuse(engine.decoding_refused)
        return None if self._refused else engine.version

    def _refuse(self, why: str) -> None:
        self._refused = why
        log.info("policy %s: decoding deltas on the node's host: %s", self._policy, why)

    def _adds_to(self) -> int | None:
        """Return the version whose adapters the engine adds to its weights; None if adapters are merged here."""
        engine = self._engine
        return engine.base if isinstance(engine, TakesAdapters) and not engine.adapters_refused else None

    async def _taken(self, pulled: Pulled) -> bool:
        """Return whether the engine took what it decodes or adds itself."""
        if pulled.adapter is not None:
            return await self._added(pulled, pulled.adapter)
        return pulled.deltas is not None and await self._decoded(pulled)

    async def _added(self, pulled: Pulled, adapter: Adapter) -> bool:
        engine, base = self._engine, pulled.transfer.base
        assert isinstance(engine, TakesAdapters)
        assert base is not None
        try:
            await engine.apply_adapter(adapter, base, pulled.version, pulled.probe)
        except (WeightsError, EngineError) as error:
            # A server that was lost will hold the base again, which merged weights would replace.
            if isinstance(error, EngineLost) or engine.adapters_only:
                raise
            log.warning(
                "policy %s: merging the adapter of version %d on the node's host: %s",
                self._policy,
                pulled.version,
                error,
            )
            return False
        return True

    async def _decoded(self, pulled: Pulled) -> bool:
        """Return whether the engine decoded the deltas. Any reason but the server's death is permanent: trying again
        for every version would cost two updates each time."""
        engine, deltas = self._engine, pulled.deltas
        assert isinstance(engine, DecodesDeltas)
        assert deltas is not None
        if deltas.base != engine.version:
            return False
        try:
            await engine.apply_deltas(deltas, pulled.version, pulled.probe)
        except (WeightsError, EngineError) as error:
            log.warning(
                "policy %s: sending version %d to the engine as a whole: %s", self._policy, pulled.version, error
            )
            if not isinstance(error, EngineLost | ProbeMismatch):
                self._refuse(error.message)
            return False
        return True

    async def _patched(self, pulled: Pulled) -> bool:
        """Return whether the engine applied the patch."""
        if pulled.patch is None or pulled.patch.base != self._engine.version:
            return False
        try:
            await self._engine.patch(pulled.patch, pulled.version, pulled.probe)
        except (WeightsError, EngineError) as error:
            log.warning(
                "policy %s: sending version %d to the engine as a whole: %s", self._policy, pulled.version, error
            )
            return False
        return True

    # ------------------------------------------------------------ proofs

    def _note_good(self, version: int) -> None:
        self._served, self._failed, self.trouble = version, None, ""
        self.transfers.proven += 1
        self._said.clear()

    def _rests(self, head: int) -> bool:
        """Return whether the probe of this version failed a moment ago, so that it is not loaded again yet."""
        return self._failed is not None and self._failed[0] == head and self._clock.monotonic() < self._failed[1]

    async def _mistrust(self, error: ProbeMismatch) -> None:
        """Report a failed probe in the log and to the run: the engine samples nothing until a probe succeeds."""
        self._failed = error.version, self._clock.monotonic() + _AGAIN
        self.transfers.refuted += 1
        earlier: dict[int, Probe] = {}
        for version in {self._served, _ROOT} - {error.version}:
            with suppress(*_TROUBLE):  # it may have been removed
                if (probe := await self._supply.probe(version)) is not None:
                    earlier[version] = probe
        self._complain(
            f"version {error.version} not loaded", ProbeMismatch(error.version, error.probe, error.scores, earlier)
        )

    async def run(self, every: float) -> None:
        """Follow the head until cancelled, with at least `every` seconds between two looks."""
        while True:
            await self.refresh()
            await asyncio.sleep(every)
            try:
                await self._supply.changed(_LOOK)
            except _TROUBLE as error:
                self._complain("the weight source does not answer", error)
                await asyncio.sleep(_AWAY)

    def _complain(self, what: str, error: Exception) -> None:
        """Log a complaint. Nodes that are behind ask several times a second, so it is not repeated for a while."""
        if not self._engine.proven:
            why = error.message if isinstance(error, RillflowError) else str(error)
            self.trouble = f"policy {self._policy}: {what}: {why}"
        now = self._clock.monotonic()
        self._said = {text: until for text, until in self._said.items() if until > now}
        if what not in self._said:
            self._said[what] = now + _REPEAT
            still = f"version {self._engine.version} goes on" if self._engine.proven else "the engine samples nothing"
            log.warning("policy %s: %s, %s: %s", self._policy, what, still, error)

    async def close(self) -> None:
        await self._supply.close()


def troubles(refreshers: Iterable[Refresher]) -> str:
    """Return why some of their engines do not sample."""
    return "; ".join(refresher.trouble for refresher in refreshers if refresher.trouble)
