"""The async face of the embedded engine: requests in from many coroutines, one driver that steps the core.

Invariants: only the driver, or a coroutine that holds `_between`, touches the core, so `pause`, `load` and `patch` act
between two tokens. Nothing is sampled from weights that have not reproduced the probe that came with them. A request
always ends: with a finish reason, or with EngineLost when a step failed. A slow consumer costs memory bounded by its
own max_tokens, and finds the waiting tokens merged into one chunk per version.

On a CPU a step runs in the event loop's own thread: a second thread would only fight it for the interpreter lock. On a
GPU steps run in a single worker thread, and the loop serves meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import msgspec

from rillflow.contracts import UNKNOWN, Clock, SystemClock
from rillflow.engine.embedded.core import Core
from rillflow.engine.embedded.sampling import Grammars, Matcher
from rillflow.engine.embedded.slots import Ticket
from rillflow.engine.requests import Stream, check_request
from rillflow.errors import EngineError, EngineLost, QueueFull
from rillflow.types import Chunk, EngineStats, GenerateRequest, Probe
from rillflow.weights import probe as probing
from rillflow.wire import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Patch, Tensors

_SEED_MASK = 2**64 - 1
# Turns of the event loop between two steps. A request that arrives at a server in this loop takes about three from the
# socket to `generate`, and would otherwise wait for a whole step at each.
_TURNS = 3
_SETTLE_SECONDS = 5.0  # new weights wait no longer for sequences that are computed again under the last ones
_HAND_OUT_SECONDS = 0.25  # tokens of unfinished requests are handed to their readers this often, not one by one


class EmbeddedEngine:
    """Continuous batching for a transformers causal model. Takes over `model`: its weights are changed in place."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int = 0,
        slots: int = 64,
        context: int = 512,
        queue: int = 1024,
        exact: bool = False,
        on_update: Literal["refill", "keep"] = "refill",
        tokenizer: Callable[[], Any] | None = None,
        clock: Clock | None = None,
        record: bool = False,
    ) -> None:
        """`tokenizer` returns the model's tokenizer; it is called when the first answer has a grammar. With `record`,
        answers come with the experts that the model chose for each token."""
        self._grammars = Grammars(tokenizer, model.config.vocab_size)
        self._core = Core(
            model,
            version,
            slots,
            context,
            exact=exact,
            keep=on_update == "keep",
            grammars=self._grammars,
            record=record,
        )
        self._context = context
        self._queue = queue
        self._vocabulary: int = model.config.vocab_size
        self._clock = clock or SystemClock()
        self._worker = ThreadPoolExecutor(1, "engine") if model.device.type != "cpu" else None
        self._between = asyncio.Lock()
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        self._paused = False
        self._proven = True
        self._closed = False
        self._driver: asyncio.Task[None] | None = None
        # Weak: a caller that drops its stream thereby aborts the request.
        self._streams: WeakValueDictionary[Ticket, Stream] = WeakValueDictionary()
        self._preparing: set[Ticket] = set()  # whose grammar is being compiled
        self._handed_out = 0.0
        self._load_seconds = 0.0

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def proven(self) -> bool:
        return self._proven

    @property
    def context(self) -> int:
        return self._context

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._core.stats(), load_seconds=self._load_seconds)

    async def start(self) -> None:
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), name="embedded engine")

    async def close(self) -> None:
        """Stop. Open requests end with EngineLost, later ones are refused."""
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
            self._driver = None
        self._stepped.set()
        async with self._between:
            self._fail(_closed())
        if self._worker is not None:
            self._worker.shutdown()
        self._grammars.close()

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._check(request)
        seed = request.sampling.seed
        ticket = Ticket(request, (secrets.randbits(64) if seed is None else seed) & _SEED_MASK)
        stream = Stream(lambda: self._abort(ticket))
        self._streams[ticket] = stream
        if request.sampling.grammar is not None:
            ticket.matcher = self._grammars.known(request)
            if ticket.matcher is None:
                self._prepare(ticket)
                return stream
        self._submit(ticket)
        return stream

    def _submit(self, ticket: Ticket) -> None:
        self._core.submit(ticket)
        self._wake.set()

    def _prepare(self, ticket: Ticket) -> None:
        """Compile the grammar of a request in a thread; the engine samples for others meanwhile."""
        loop = asyncio.get_running_loop()
        self._preparing.add(ticket)

        def made(future: Future[Matcher]) -> None:
            if not future.cancelled():
                loop.call_soon_threadsafe(self._prepared, ticket, future)

        self._grammars.prepare(ticket.request).add_done_callback(made)

    def _prepared(self, ticket: Ticket, future: Future[Matcher]) -> None:
        if ticket not in self._preparing:  # it was aborted meanwhile
            return
        self._preparing.discard(ticket)
        error = future.exception()
        if error is None:
            ticket.matcher = future.result()
            self._submit(ticket)
            return
        ticket.ended = True
        stream = self._streams.pop(ticket, None)
        if stream is not None:
            stream.fail(error if isinstance(error, Exception) else EngineLost(repr(error)))

    async def pause(self) -> None:
        self._paused = True
        self._stepped.set()
        async with self._between:
            self._core.flush()
            self._hand_out()

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def free(self) -> None:
        """Release the cache's memory of a paused engine until the next token is sampled."""
        async with self._between:
            await self._run(self._core.free)

    @property
    def cache_bytes(self) -> int:
        return self._core.cache_bytes

    def doubt(self) -> None:
        self._proven = False

    async def prove(self, probe: Probe | None) -> None:
        async with self._between:
            await self._prove(probe)

    async def load(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        await self._change(lambda: self._core.load(tensors, version), probe)

    async def patch(self, patch: Patch, version: int, probe: Probe | None = None) -> None:
        # Check, locate and copy to the device while tokens are sampled: the pause is for writing only.
        writes = await asyncio.to_thread(self._core.prepare, patch)
        await self._change(lambda: self._core.patch(writes, patch.base, version), probe)

    async def _change(self, change: Callable[[], None], probe: Probe | None) -> None:
        """Give the core other weights, between two tokens."""
        await self._settle()
        async with self._between:
            began = self._clock.monotonic()
            try:
                await self._run(change)
                await self._prove(probe)
            finally:
                self._load_seconds += self._clock.monotonic() - began
                self._hand_out()

    async def _prove(self, probe: Probe | None) -> None:
        """Sample from the core's weights only once they have reproduced the probe, if there is one. A caller that is
        cancelled before leaves them unproven."""
        scores: list[list[float]] = []
        try:
            if probe is not None:
                await self._run(lambda: scores.extend(self._core.scores(probe.prompts)))
                probing.check(self._core.version, probe, scores)
        except BaseException as error:
            self._proven = False
            if isinstance(error, probing.ProbeMismatch):
                self._core.version = UNKNOWN
            raise
        self._proven = True
        self._wake.set()

    async def _settle(self) -> None:
        """Wait until every running sequence has had a token of the last load's weights. Loads that come faster than
        sequences are computed again would otherwise stop all of them."""
        deadline = self._clock.monotonic() + _SETTLE_SECONDS
        while self._core.owes and self._sampling and self._clock.monotonic() < deadline:
            self._stepped.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    await self._stepped.wait()

    # ------------------------------------------------------------ the driver

    @property
    def _sampling(self) -> bool:
        """Return whether tokens may be sampled now."""
        return self._proven and not (self._paused or self._closed)

    async def _drive(self) -> None:
        while True:
            while not (self._sampling and self._core.busy):
                self._wake.clear()
                await self._wake.wait()
            async with self._between:
                if self._sampling:
                    await self._step()
            self._stepped.set()
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _step(self) -> None:
        try:
            await self._run(self._advance)
            self._hand_out()
        except Exception as error:
            self._fail(error)

    def _advance(self) -> None:
        self._core.step()
        now = self._clock.monotonic()
        if now - self._handed_out >= _HAND_OUT_SECONDS:
            self._handed_out = now
            self._core.flush()

    async def _run(self, work: Callable[[], None]) -> None:
        if self._worker is None:
            work()
        else:
            # A cancelled caller must not leave while the worker still changes the core.
            await in_thread(work, self._worker)

    def _hand_out(self) -> None:
        for ticket, chunk in self._core.outbox.take():
            stream = self._streams.get(ticket)
            if stream is not None:
                stream.push(chunk)
            if chunk.finish is not None:
                self._streams.pop(ticket, None)

    def _fail(self, error: Exception) -> None:
        """End every open request, after the tokens that were sampled before. The rest can be sampled elsewhere."""
        if isinstance(error, EngineError):
            error = EngineLost(error.message, error.hint)
        self._hand_out()
        for ticket in [*self._core.fail(), *self._preparing]:
            stream = self._streams.pop(ticket, None)
            if stream is not None:
                stream.fail(error)
        self._preparing.clear()

    def _abort(self, ticket: Ticket) -> None:
        if ticket in self._preparing:
            self._preparing.discard(ticket)
        elif not ticket.ended:
            self._core.abort(ticket)
            self._wake.set()

    # ------------------------------------------------------------ admission

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise _closed()
        if self._core.waiting + len(self._preparing) >= self._queue:
            raise QueueFull(f"{self._queue} requests are waiting", "ask again later or add an engine")
        check_request(request, context=self._context, vocabulary=self._vocabulary)


def _closed() -> EngineLost:
    return EngineLost("the engine was closed", "send the request to another engine")
