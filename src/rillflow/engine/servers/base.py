"""An engine that is a server: its life and its weights. `calls` has its answers; an adapter speaks to the server.

Invariants: every token has the version that sampled it: weights change while no attempt to sample runs, or, with
`on_update: keep`, the server says the version of each token. Weights that have not reproduced the probe that came with
them hold the engine; of tokens that were sampled from them meanwhile none is delivered. A request always ends: with a
finish reason, or with EngineLost when the server died or does not obey. Such a server is started again, and samples
nothing before it has weights again. Only requests wait for a server that is down.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from rillflow.config.policy import EngineConfig
from rillflow.contracts import UNKNOWN, Clock, SystemClock, Turn
from rillflow.engine.requests import check_request
from rillflow.engine.servers.calls import Calls, Part
from rillflow.engine.servers.weights import ModelFacts, Tainted, Update
from rillflow.errors import EngineError, EngineLost, QueueFull, RillflowError, WeightsError
from rillflow.storage import startup
from rillflow.types import Chunk, EngineStats, GenerateRequest, Probe
from rillflow.weights import probe as probing
from rillflow.wire import take_short_turns

if TYPE_CHECKING:
    from rillflow.contracts import Deltas, Patch, Tensors

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # before a server that died is started again
_WEIGHTS_SECONDS = 60.0  # a server that was started again waits no longer for newer weights than the initial ones
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_DOWN, _PAUSED, _UPDATE, _WEIGHTS = "down", "paused", "update", "weights"


class ServerEngine(ABC):
    """A `contracts.Engine` that takes turns. An adapter writes the abstract methods; all else is the same for all
    servers."""

    def __init__(self, model: ModelFacts, settings: EngineConfig, *, clock: Clock | None = None) -> None:
        self.model = model
        self.settings = settings
        self._clock = clock or SystemClock()
        self._version = 0
        self._calls = Calls(self.sample, lambda: self._version, settings.context, self._clock)
        self._calls.hold(_DOWN)
        self._one_at_a_time = asyncio.Lock()
        self._disobeyed = asyncio.Event()  # the server did not obey a command
        self._halted = False  # whether the server was stopped from sampling
        self._asleep = False  # whether it has given its memory back
        self._doubts = False  # whether weights must be proven before they are sampled from
        self.keeps = settings.on_update == "keep"  # whether answers go on while weights change
        self.turn: Turn = nullcontext
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._loads = 0
        self._load_seconds = 0.0
        self.update_seconds: dict[str, float] = {}  # of the last update, part by part
        self.prefilled = self.reused = 0  # counted by the adapter, where the server tells

    # ------------------------------------------------------------ what an adapter writes

    @abstractmethod
    async def bring_up(self) -> None:
        """Start the server, or find the one that runs, until it can sample. Raise EngineLost where that fails."""

    @abstractmethod
    async def lost(self) -> str:
        """Return the reason once the server that was brought up can no longer be used."""

    @abstractmethod
    async def tear_down(self) -> None:
        """Disconnect from the server, whatever its state; stop it if it was started here."""

    @abstractmethod
    def sample(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        """Make one attempt. The last part has a `finish`. Raise EngineLost where the server is gone."""

    @abstractmethod
    async def cut(self) -> None:
        """End every running attempt between two tokens; the server samples nothing until `go_on`."""

    @abstractmethod
    async def go_on(self) -> None: ...

    @abstractmethod
    async def prepare_load(self, tensors: Tensors) -> Update:
        """Prepare a whole set of weights. Raise WeightsError if it does not fit. They are not read after that."""

    @abstractmethod
    async def prepare_patch(self, patch: Patch) -> Update:
        """Prepare changes of weights, in the same way."""

    @abstractmethod
    async def scores(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[float]]:
        """Return the model's own log-probs of each prompt's tokens but the first, by one request to a server that
        samples nothing else. No other request finds it in the prefix cache."""

    async def announce(self, version: int) -> None:
        """Tell the server which version the next weights are. A server whose answers go on while weights change says
        the version of each token."""
        raise EngineError("this server cannot say the versions of tokens", "set engine.on_update: refill")

    async def sleep(self) -> bool:
        """Let the server release its memory while nothing is sampled; return whether it did. Few servers can."""
        return False

    async def wake(self) -> None:
        """Let the server allocate its memory again. It has kept its weights; cached sequences are lost."""
        raise EngineLost("this server has not slept")

    # ------------------------------------------------------------ the contract

    @property
    def version(self) -> int:
        return self._version

    @property
    def proven(self) -> bool:
        return _WEIGHTS not in self._calls.held

    @property
    def context(self) -> int:
        return self.settings.context

    def stats(self) -> EngineStats:
        slots = self.settings.slots
        return EngineStats(
            version=self._version,
            running=min(self._calls.running, slots),
            waiting=self._waiting,
            slots=slots,
            generated_tokens=self._calls.generated,
            prefilled_tokens=self.prefilled,
            reused_tokens=self.reused,
            steps=0,
            loads=self._loads,
            load_seconds=self._load_seconds,
        )

    @property
    def _waiting(self) -> int:
        return len(self._calls) - min(self._calls.running, self.settings.slots)

    async def start(self) -> None:
        if self._supervisor is None:
            take_short_turns()  # this process streams answers, and decodes weights meanwhile
            startup.doing(f"waiting for {_NAMES.get(self.settings.kind, self.settings.kind)} to load the model")
            try:
                await self.bring_up()
            except BaseException:
                await self.tear_down()
                raise
            self._calls.release(_DOWN)
            self._supervisor = asyncio.create_task(self._supervise(), name="server engine")

    async def close(self) -> None:
        """Stop. Open requests end with EngineLost, later ones are refused."""
        self._closed = True
        self._calls.hold(_DOWN)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        await self._calls.fail(_closed())
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
        return self._calls.begin(request)

    async def pause(self) -> None:
        self._calls.hold(_PAUSED)
        async with self._one_at_a_time:
            await self._cut_all("paused")

    async def resume(self) -> None:
        async with self._one_at_a_time:
            await self._wake_up()
            await self._let_go(_PAUSED)

    async def free(self) -> None:
        """Release memory of a paused server, if it can, until weights are loaded or it is resumed."""
        async with self._one_at_a_time:
            if _PAUSED not in self._calls.held or _DOWN in self._calls.held or self._asleep:
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
        self._calls.hold(_WEIGHTS)

    async def prove(self, probe: Probe | None) -> None:
        async with self._one_at_a_time:
            await self._apply(None, self._version, probe)

    async def load(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Load as the contract says. Raise `Tainted` if the written weights are wrong: the version is unknown then."""
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
        began = self._clock.monotonic()
        try:
            if not self._can_keep:
                await self._calls.settle()
            settled = self._clock.monotonic()
            async with self._one_at_a_time:
                check()
                self._check_up()
                if not self._asleep:
                    await update.get_ready()
            before = {"settle": settled - began, "ready": self._clock.monotonic() - settled}
            async with self.turn(), self._one_at_a_time:
                check()
                apply = self._apply_beside if self._can_keep else self._apply
                await apply(update, version, probe, before)
                self._loads += 1
        finally:
            await update.close()

    async def _apply(
        self, update: Update | None, version: int, probe: Probe | None, before: Mapping[str, float] | None = None
    ) -> None:
        """Write and prove weights; without an update, prove the present ones. `before` are the seconds that the update
        took until now."""
        self._check_up()
        began = self._clock.monotonic()
        self._calls.hold(_UPDATE)
        try:
            await self._wake_up()
            await self._cut_all("weights")
            self._calls.trust()
            self.update_seconds = {**(before or {}), "cut": self._clock.monotonic() - began}
            await self._write(update, version, probe)
            self._log_update(version)
            self._version = version
            self._calls.held.discard(_WEIGHTS)
        finally:
            await self._let_go(_UPDATE)
            self._load_seconds += self._clock.monotonic() - began

    @property
    def _can_keep(self) -> bool:
        """Return whether answers may go on while weights change. Those that come as a whole are scored at their end, by
        the weights of their beginning."""
        return self.keeps and not (self._calls.held or self._asleep or self._calls.has_whole)

    async def _apply_beside(
        self, update: Update, version: int, probe: Probe | None, before: Mapping[str, float]
    ) -> None:
        """Write weights between two tokens of the running answers, which keep their cached keys and values. Tokens that
        are sampled from new weights are delivered once these are proven."""
        self._check_up()
        began = self._clock.monotonic()
        self.update_seconds = dict(before)
        self._calls.doubt(version)
        try:
            await self._write(update, version, probe)
            self._log_update(version)
            self._version = version
        finally:
            if self._version == UNKNOWN:
                self._calls.reject()
                with suppress(EngineLost):  # then the supervisor ends all answers
                    await self._cut_all("weights")
            else:
                self._calls.trust()
            self._load_seconds += self._clock.monotonic() - began

    def _log_update(self, version: int) -> None:
        log.info("version %d: %s", version, ", ".join(f"{part} {s:.3f} s" for part, s in self.update_seconds.items()))

    async def _write(self, update: Update | None, version: int, probe: Probe | None) -> None:
        """Write and prove. If this ends early, also by a cancelled caller, the version is unknown."""
        try:
            if update is not None:
                began = self._clock.monotonic()
                if self.keeps:
                    await self.announce(version)
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
                self._calls.hold(_WEIGHTS)
            if isinstance(error, EngineLost):
                self._disobeyed.set()
            raise

    def _check_up(self) -> None:
        if _DOWN in self._calls.held:
            raise EngineLost("the server is down", "it is started again: try later")

    def _check_base(self, change: Patch | Deltas) -> None:
        if change.base != self._version:
            raise WeightsError(
                f"the patch is of version {change.base}, the engine serves {self._version}", "load the whole weights"
            )

    # ------------------------------------------------------------ who may sample

    async def _let_go(self, reason: str) -> None:
        """Remove a reason to hold; without any other, the server samples again."""
        if not self._calls.held - {reason}:
            await self._go_on()
        self._calls.release(reason)

    async def _go_on(self) -> None:
        """Let the server sample again, if it was stopped."""
        if not self._halted:
            return
        try:
            await self.go_on()
        except EngineLost as error:
            log.warning("the server does not go on: %s", error.message)
            self._disobeyed.set()
        self._halted = False

    async def _cut_all(self, cause: str) -> None:
        """Return once the server samples no answer."""
        if not self._calls.running:
            return
        self._halted = True
        try:
            await self._calls.cut(self.cut, cause)
        except EngineLost:
            self._disobeyed.set()
            raise

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        while True:
            reason = await self._loss()
            log.warning("the server is lost: %s", reason)
            self._calls.hold(_DOWN)
            await self._calls.fail(EngineLost(f"the server was lost: {reason}", "the request can go on elsewhere"))
            async with self._one_at_a_time:  # a change of weights that was under way has ended
                self._halted = self._asleep = False
            await self._again()
            self._disobeyed.clear()
            began_with, self._version = self._version, 0
            if self._doubts:
                self._calls.hold(_WEIGHTS)
            elif began_with != 0:
                self._calls.hold(_WEIGHTS)
                asyncio.get_running_loop().call_later(_WEIGHTS_SECONDS, self._make_do, self._loads)
            self._calls.release(_DOWN)

    async def _loss(self) -> str:
        """Return the reason once the server is lost, or does not obey."""
        lost, disobeyed = asyncio.create_task(self.lost()), asyncio.create_task(self._disobeyed.wait())
        try:
            await asyncio.wait({lost, disobeyed}, return_when=asyncio.FIRST_COMPLETED)
            return lost.result() if lost.done() else "it does not obey"
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
            except Exception as error:  # of any kind, such as a full disk: requests wait for the next try
                log.warning(
                    "the server was not started again: %s", error, exc_info=not isinstance(error, RillflowError)
                )
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _make_do(self, loads: int) -> None:
        if loads == self._loads and self._version == 0:
            log.warning("no newer weights have come: the server goes on with the initial ones")
            self._calls.release(_WEIGHTS)


def _closed() -> EngineLost:
    return EngineLost("the engine was closed", "send the request to another engine")
