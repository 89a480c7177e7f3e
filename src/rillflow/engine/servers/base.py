"""An engine that is a server of its own: what does not depend on how the server is spoken to.

Invariants: an attempt to sample runs only while no reason holds the engine, and weights change only once no attempt
runs, so every token has the version that sampled it; a reason to hold is that weights have not reproduced the probe
that came with them. Answers that are cut go on from the ids they have: nothing sampled
is delivered twice, nothing delivered is sampled again. A request always ends: with a finish reason, or with EngineLost
when the server died or no longer does what it is told; it is then started again, and samples nothing before it has
weights again. Nobody but a request waits for a server that is not there.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING
from weakref import ref

from rillflow.config.policy import EngineConfig
from rillflow.contracts import UNKNOWN, Clock, SystemClock
from rillflow.engine.admission import check_request
from rillflow.engine.servers.calls import Call, Part
from rillflow.engine.servers.facts import ModelFacts
from rillflow.engine.servers.layout import Tainted
from rillflow.engine.servers.updates import Update
from rillflow.engine.stream import Stream
from rillflow.errors import EngineError, EngineLost, QueueFull, RillflowError, WeightsError
from rillflow.storage import startup
from rillflow.types import Chunk, EngineStats, FinishReason, GenerateRequest, Probe
from rillflow.weights import probe as probing
from rillflow.wire import take_short_turns

if TYPE_CHECKING:
    from rillflow.contracts import Deltas, Patch, Tensors

log = logging.getLogger(__name__)

_CUT_SECONDS = 10.0  # for running attempts to end when the server was told to cut them
_SETTLE_SECONDS = 5.0  # new weights wait no longer for answers that have had no token of the last ones
_WHOLE_SECONDS = 30.0  # likewise, where one of them was sampled anew from its beginning
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # before a server that died is started again
_WEIGHTS_SECONDS = 60.0  # a server that was started again waits no longer for newer weights than the initial ones
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_DOWN, _PAUSED, _UPDATE, _WEIGHTS = "down", "paused", "update", "weights"


class ServerEngine(ABC):
    """A `contracts.Engine`. What an adapter writes is below; everything else is the same for all servers."""

    def __init__(self, model: ModelFacts, settings: EngineConfig, *, clock: Clock | None = None) -> None:
        self.model = model
        self.settings = settings
        self._clock = clock or SystemClock()
        self._version = 0
        self._held = {_DOWN}
        self._open = asyncio.Event()
        self._calls: set[Call] = set()
        self._attempts: set[Call] = set()
        self._moved = asyncio.Event()  # an attempt has ended, or had its first token
        self._one_at_a_time = asyncio.Lock()
        self._disobeyed = asyncio.Event()  # the server did not do what it was told
        self._halted = False  # whether the server was told to sample nothing
        self._asleep = False  # whether it has given its memory back
        self._doubts = False  # whether weights must be proven before they are sampled from
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._generated = self._loads = 0
        self._load_seconds = 0.0
        self.update_seconds: dict[str, float] = {}  # of the last update, part by part
        self.prefilled = self.reused = 0  # counted by the adapter, where the server tells

    # ------------------------------------------------------------ what an adapter writes

    @abstractmethod
    async def bring_up(self) -> None:
        """Start the server, or look for the one that runs, and be ready to sample. EngineLost where it cannot be."""

    @abstractmethod
    async def lost(self) -> str:
        """Returns, with the reason, once the server that was brought up can no longer be used."""

    @abstractmethod
    async def tear_down(self) -> None:
        """Let go of the server, whatever state it is in; one that was started is stopped."""

    @abstractmethod
    def sample(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        """One attempt. The last part has a `finish`; EngineLost when the server is gone."""

    @abstractmethod
    async def cut(self) -> None:
        """Have every running attempt end between two tokens, and nothing sampled until `go_on`."""

    @abstractmethod
    async def go_on(self) -> None: ...

    @abstractmethod
    async def prepare_load(self, tensors: Tensors) -> Update:
        """WeightsError when they do not fit. The tensors are not read any more once it has returned."""

    @abstractmethod
    async def prepare_patch(self, patch: Patch) -> Update:
        """Likewise."""

    @abstractmethod
    async def scores(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[float]]:
        """The model's own log-probs of each prompt's tokens but the first, by one request to a server that samples
        nothing else; nothing of it is found in the prefix cache by anybody."""

    async def sleep(self) -> bool:
        """Have the server give its memory back, while nothing is sampled; whether it did. Few servers can."""
        return False

    async def wake(self) -> None:
        """The server takes its memory again; what it had cached of sequences is lost, its weights are not."""
        raise EngineLost("this server has not slept")

    # ------------------------------------------------------------ the contract

    @property
    def version(self) -> int:
        return self._version

    @property
    def proven(self) -> bool:
        return _WEIGHTS not in self._held

    @property
    def context(self) -> int:
        return self.settings.context

    def stats(self) -> EngineStats:
        slots = self.settings.slots
        return EngineStats(
            version=self._version,
            running=min(len(self._attempts), slots),
            waiting=self._waiting,
            slots=slots,
            generated_tokens=self._generated,
            prefilled_tokens=self.prefilled,
            reused_tokens=self.reused,
            steps=0,
            loads=self._loads,
            load_seconds=self._load_seconds,
        )

    @property
    def _waiting(self) -> int:
        return len(self._calls) - min(len(self._attempts), self.settings.slots)

    async def start(self) -> None:
        if self._supervisor is None:
            take_short_turns()  # this process streams answers, and decodes weights meanwhile
            startup.doing(f"waiting for {_NAMES.get(self.settings.kind, self.settings.kind)} to load the model")
            try:
                await self.bring_up()
            except BaseException:
                await self.tear_down()
                raise
            self._release(_DOWN)
            self._supervisor = asyncio.create_task(self._supervise(), name="server engine")

    async def close(self) -> None:
        """Stop for good. Requests still open end with EngineLost, later ones are refused."""
        self._closed = True
        self._hold(_DOWN)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        await self._fail_all(_closed())
        await self.tear_down()

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self._closed:
            raise _closed()
        check_request(request, context=self.settings.context, vocabulary=self.model.vocabulary)
        if self._waiting >= self.settings.queue:
            raise QueueFull(f"{self.settings.queue} requests are waiting", "ask again later or add an engine")
        if request.begun and request.sampling.grammar is not None:
            raise EngineError(
                "an answer under a grammar cannot be continued here", "let engines of one kind serve a policy"
            )
        call = Call(request, self.settings.context)
        stream = Stream(call.abort)
        call.stream = ref(stream)
        self._calls.add(call)
        call.task = asyncio.create_task(self._serve(call))
        return stream

    async def pause(self) -> None:
        self._hold(_PAUSED)
        async with self._one_at_a_time:
            await self._cut_all("paused")

    async def resume(self) -> None:
        async with self._one_at_a_time:
            await self._wake_up()
            await self._let_go(_PAUSED)

    async def free(self) -> None:
        """Give memory back, where the server can, until weights are loaded or it is resumed; for one that is paused."""
        async with self._one_at_a_time:
            if _PAUSED not in self._held or _DOWN in self._held or self._asleep:
                return
            try:
                self._asleep = await self.sleep()
            except EngineLost as error:
                log.warning("the server keeps its memory: %s", error.message)

    async def _wake_up(self) -> None:
        if not self._asleep:
            return
        self._asleep = False
        try:
            await self.wake()
        except EngineLost as error:
            log.warning("the server does not wake up: %s", error.message)
            self._disobeyed.set()

    def doubt(self) -> None:
        self._doubts = True
        self._hold(_WEIGHTS)

    async def prove(self, probe: Probe | None) -> None:
        async with self._one_at_a_time:
            await self._apply(None, self._version, probe)

    async def load(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """As the contract has it. Where the written weights turn out wrong, `Tainted`: the version is unknown then."""
        self._check_up()
        await self._change(await self.prepare_load(tensors), version, probe)

    async def patch(self, patch: Patch, version: int, probe: Probe | None = None) -> None:
        self._check_up()
        self._check_base(patch)
        await self._change(await self.prepare_patch(patch), version, probe, lambda: self._check_base(patch))

    # ------------------------------------------------------------ weights

    async def _change(
        self, update: Update, version: int, probe: Probe | None, check: Callable[[], None] = lambda: None
    ) -> None:
        try:
            await self._settle()
            async with self._one_at_a_time:
                check()
                await self._apply(update, version, probe)
                self._loads += 1
        finally:
            await update.close()

    async def _apply(self, update: Update | None, version: int, probe: Probe | None) -> None:
        """Write and prove weights; without an update, prove those that are there."""
        self._check_up()
        began = self._clock.monotonic()
        self._hold(_UPDATE)
        try:
            await self._wake_up()
            await self._cut_all("weights")
            self.update_seconds = {"cut": self._clock.monotonic() - began}
            await self._write(update, version, probe)
            log.info(
                "version %d: %s", version, ", ".join(f"{part} {s:.3f} s" for part, s in self.update_seconds.items())
            )
            self._version = version
            self._held.discard(_WEIGHTS)
        finally:
            await self._let_go(_UPDATE)
            self._load_seconds += self._clock.monotonic() - began

    async def _write(self, update: Update | None, version: int, probe: Probe | None) -> None:
        """However it is broken off, also by a caller who goes: nobody knows then what was written."""
        try:
            if update is not None:
                began = self._clock.monotonic()
                await update.apply()
                self.update_seconds |= {"apply": self._clock.monotonic() - began, **update.seconds}
            if probe is not None:
                await self._go_on()  # our own answers are held; the server must sample for the probe
                began = self._clock.monotonic()
                probing.check(version, probe, await self.scores(probe.prompts, version))
                self.update_seconds["probe"] = self._clock.monotonic() - began
        except BaseException as error:
            if isinstance(error, Tainted | probing.ProbeMismatch) or not isinstance(error, WeightsError):
                self._version = UNKNOWN
                self._hold(_WEIGHTS)
            if isinstance(error, EngineLost):
                self._disobeyed.set()
            raise

    def _check_up(self) -> None:
        if _DOWN in self._held:
            raise EngineLost("the server is not there", "it is started again: try later")

    def _check_base(self, change: Patch | Deltas) -> None:
        if change.base != self._version:
            raise WeightsError(
                f"the patch is of version {change.base}, the engine serves {self._version}", "load the whole weights"
            )

    async def _settle(self) -> None:
        """Let every answer have a token of the last weights: weights that come faster than sequences are computed
        again would otherwise keep all of them from getting on. Answers that are scored have their first token with
        their last."""
        owing = [call for call in self._calls if call.owed]
        seconds = _WHOLE_SECONDS if any(call.whole for call in owing) else _SETTLE_SECONDS
        deadline = self._clock.monotonic() + seconds
        while not self._held and any(call.owed for call in self._calls) and self._clock.monotonic() < deadline:
            await self._wait_moved(seconds)

    # ------------------------------------------------------------ who may sample

    def _hold(self, reason: str) -> None:
        self._held.add(reason)
        self._open.clear()

    def _release(self, reason: str) -> None:
        self._held.discard(reason)
        if not self._held:
            self._open.set()

    async def _let_go(self, reason: str) -> None:
        """The reason is gone; without any other, the server samples again."""
        if not self._held - {reason}:
            await self._go_on()
        self._release(reason)

    async def _go_on(self) -> None:
        """The server samples what it is asked for, if it was told not to."""
        if not self._halted:
            return
        try:
            await self.go_on()
        except EngineLost as error:
            log.warning("the server does not go on: %s", error.message)
            self._disobeyed.set()
        self._halted = False

    async def _cut_all(self, cause: str) -> None:
        """Returns once no attempt runs. One that does not end by itself is given up: what it has not handed over is
        sampled again."""
        if not self._attempts:
            return
        for call in self._attempts:
            call.cause = cause
        self._halted = True
        try:
            await self.cut()
        except EngineLost:
            self._disobeyed.set()
            raise
        deadline = self._clock.monotonic() + _CUT_SECONDS
        while self._attempts and self._clock.monotonic() < deadline:
            await self._wait_moved(_CUT_SECONDS)
        for call in self._attempts:
            if call.limit is not None:
                call.limit.reschedule(asyncio.get_running_loop().time())
        while self._attempts:
            await self._wait_moved(_CUT_SECONDS)

    async def _wait_moved(self, seconds: float) -> None:
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()

    # ------------------------------------------------------------ answers

    async def _serve(self, call: Call) -> None:
        try:
            while (finish := call.progress.over()) is None:
                while not self._open.is_set():
                    await self._open.wait()
                if await self._attempt(call):
                    return
            call.push(Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=self._version, finish=finish))
        except RillflowError as error:
            call.fail(error)
        except Exception as error:
            log.exception("an answer of the server could not be read")
            call.fail(error)
        finally:
            self._calls.discard(call)

    async def _attempt(self, call: Call) -> bool:
        """Whether the answer has ended. The version is that of the attempt's beginning: it does not change in it."""
        version = self._version
        self._attempts.add(call)
        try:
            attempt = self.sample(call.progress.rest(), version)
            async with asyncio.timeout(None) as call.limit, aclosing(attempt) as parts:
                async for part in parts:
                    finish = None if part.finish == "abort" else part.finish
                    if part.tokens or finish is not None:
                        self._hand_over(call, part, finish, version)
                    if part.finish is not None:
                        call.check_end(part)
                        return finish is not None
            raise EngineLost("the server ended an answer without saying how", "see its log")
        except TimeoutError as error:
            if call.limit is not None and call.limit.expired():
                return False
            raise EngineLost("the server was silent for too long", "the request can go on elsewhere") from error
        finally:
            call.end_attempt()
            self._attempts.discard(call)
            self._moved.set()

    def _hand_over(self, call: Call, part: Part, finish: FinishReason | None, version: int) -> None:
        chunk = Chunk(
            tokens=part.tokens,
            logprobs=part.logprobs,
            raw_logprobs=part.raw_logprobs,
            version=version,
            finish=finish,
        )
        call.push(call.progress.take(chunk))
        self._generated += len(part.tokens)
        if call.owed and part.tokens:
            call.owed = False
            self._moved.set()

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        while True:
            reason = await self._loss()
            log.warning("the server is lost: %s", reason)
            self._hold(_DOWN)
            await self._fail_all(EngineLost(f"the server was lost: {reason}", "the request can go on elsewhere"))
            async with self._one_at_a_time:  # a change of weights that was under way has ended
                self._halted = self._asleep = False
            await self._again()
            self._disobeyed.clear()
            began_with, self._version = self._version, 0
            if self._doubts:
                self._hold(_WEIGHTS)
            elif began_with != 0:
                self._hold(_WEIGHTS)
                asyncio.get_running_loop().call_later(_WEIGHTS_SECONDS, self._make_do, self._loads)
            self._release(_DOWN)

    async def _loss(self) -> str:
        """Returns, with the reason, once the server is lost, or does not do what it is told."""
        lost, disobeyed = asyncio.create_task(self.lost()), asyncio.create_task(self._disobeyed.wait())
        try:
            await asyncio.wait({lost, disobeyed}, return_when=asyncio.FIRST_COMPLETED)
            return lost.result() if lost.done() else "it does not do what it is told"
        finally:
            lost.cancel()
            disobeyed.cancel()

    async def _again(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self.tear_down()
                await asyncio.sleep(pause)
                await self.bring_up()
                return
            except Exception as error:  # a full disk, say: whoever waits here must not wait in vain
                log.warning(
                    "the server was not started again: %s", error, exc_info=not isinstance(error, RillflowError)
                )
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _make_do(self, loads: int) -> None:
        if loads == self._loads and self._version == 0:
            log.warning("no newer weights have come: the server goes on with the initial ones")
            self._release(_WEIGHTS)

    async def _fail_all(self, error: EngineLost) -> None:
        for call in list(self._calls):
            call.fail(error)
            call.task.cancel()
        tasks: list[asyncio.Task[None]] = [call.task for call in self._calls]
        if tasks:
            await asyncio.wait(tasks)


def _closed() -> EngineLost:
    return EngineLost("the engine was closed", "send the request to another engine")
