"""The answers of an engine that is a server: requests wait until nothing holds the engine, and are sampled in attempts.

Invariants: an attempt runs only while no reason holds the engine. An answer that is cut goes on from the ids that it
has: a token is never delivered twice, and a delivered token is never sampled again. A token of a version that is in
doubt is delivered only once that version is trusted; if it is rejected, the token is sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import groupby
from typing import NamedTuple
from weakref import ref

from rillflow.contracts import Clock
from rillflow.engine.requests import Progress, Stream
from rillflow.errors import EngineError, EngineLost, RillflowError
from rillflow.types import Chunk, FinishReason, GenerateRequest, Sampling

log = logging.getLogger(__name__)

TRIES = 8  # of an answer that the server cuts unasked, without one token
_CUT_SECONDS = 10.0  # for running attempts to end after the server was asked to cut them
_SETTLE_SECONDS = 5.0  # new weights wait no longer for answers that have had no token of the last ones
_WHOLE_SECONDS = 30.0  # likewise, where one of them is sampled again from its beginning


class Part(NamedTuple):
    """Tokens of one attempt. `finish` is None if more will come, and `abort` if the attempt was cut. The last part may
    have the `experts` of all tokens but the last (`engine.experts`). `versions` are those of the tokens, where weights
    may change during an attempt."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish: FinishReason | None = None
    experts: bytes = b""
    versions: Sequence[int] = ()


def is_scored(sampling: Sampling) -> bool:
    """Return whether the model's own log-probs of an answer need another request once it is complete: servers apply a
    grammar to the logits before any other code sees them."""
    return sampling.grammar is not None


def is_cut(sampling: Sampling) -> bool:
    """Return whether tokens are drawn from less than the tempered distribution."""
    return sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0)


def needs_both(sampling: Sampling) -> bool:
    """Return whether the server must compute two log-probs of each token: it draws from another distribution than the
    model's own. At temperatures 0 and 1 without cuts it returns the model's own anyway."""
    return not is_scored(sampling) and (is_cut(sampling) or sampling.temperature not in (0.0, 1.0))


class Call:
    """One request and how far it is. Its stream is held weakly: a caller that drops the stream aborts the request."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.progress = Progress(request, context)
        self.stream: ref[Stream]
        self.task: asyncio.Task[None]
        self.limit: asyncio.Timeout | None = None  # of the running attempt
        self.cause = ""  # why the running attempt is being cut
        self.owed = False  # it was cut by new weights and has had no token since
        self.whole = is_scored(request.sampling)  # all of its tokens come at its end

    def check_end(self, last: Part) -> None:
        """Raise EngineLost where the server cuts the answer again and again. A late cut may still hit one attempt."""
        self.progress.cuts += last.finish == "abort" and not self.cause
        if self.progress.cuts >= TRIES:
            raise EngineLost("the server gives up an answer that nobody has cut", "see its log")

    def end_attempt(self) -> None:
        """Keep the cause of a cut for the tokens of the next attempt."""
        self.limit = None
        if self.cause:
            self.progress.cause = self.cause
            self.owed = self.cause == "weights"
            self.cause = ""

    def push(self, chunk: Chunk) -> None:
        stream = self.stream()
        if stream is not None:
            stream.push(chunk)

    def fail(self, error: Exception) -> None:
        stream = self.stream()
        if stream is not None:
            stream.fail(error)

    def abort(self) -> None:
        self.task.cancel()


class Calls:
    """All open requests of a server engine, and the reasons for which it samples none of them.

    `sample` makes one attempt at a version; `version` returns the version that is served.
    """

    def __init__(
        self,
        sample: Callable[[GenerateRequest, int], AsyncGenerator[Part]],
        version: Callable[[], int],
        context: int,
        clock: Clock,
    ) -> None:
        self._sample = sample
        self._version = version
        self._context = context
        self._clock = clock
        self.held: set[str] = set()
        self.generated = 0  # tokens
        self._open = asyncio.Event()
        self._calls: set[Call] = set()
        self._attempts: set[Call] = set()
        self._moved = asyncio.Event()  # an attempt has ended, or had its first token
        self._doubted: int | None = None  # the version whose tokens wait for the verdict
        self._verdict: asyncio.Future[bool] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def running(self) -> int:
        return len(self._attempts)

    @property
    def has_whole(self) -> bool:
        """Return whether an answer is sampled that comes in one part."""
        return any(call.whole for call in self._attempts)

    def begin(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        call = Call(request, self._context)
        stream = Stream(call.abort)
        call.stream = ref(stream)
        self._calls.add(call)
        call.task = asyncio.create_task(self._serve(call))
        return stream

    async def fail(self, error: EngineLost) -> None:
        """End every open request with an error."""
        for call in list(self._calls):
            call.fail(error)
            call.task.cancel()
        tasks: list[asyncio.Task[None]] = [call.task for call in self._calls]
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------ holds

    def hold(self, reason: str) -> None:
        self.held.add(reason)
        self._open.clear()

    def release(self, reason: str) -> None:
        self.held.discard(reason)
        if not self.held:
            self._open.set()

    async def cut(self, tell: Callable[[], Awaitable[None]], cause: str) -> None:
        """`tell` the server to cut all attempts; return once none runs. An attempt that does not end is given up, and
        the tokens that it has not delivered are sampled again."""
        for call in self._attempts:
            call.cause = cause
        await tell()
        deadline = self._clock.monotonic() + _CUT_SECONDS
        while self._attempts and self._clock.monotonic() < deadline:
            await self._wait_moved(_CUT_SECONDS)
        for call in self._attempts:
            if call.limit is not None:
                call.limit.reschedule(asyncio.get_running_loop().time())
        while self._attempts:
            await self._wait_moved(_CUT_SECONDS)

    # ------------------------------------------------------------ versions in doubt

    def doubt(self, version: int) -> None:
        """Keep back tokens of this version until it is trusted or rejected; answers that come as a whole do not begin
        before."""
        self._doubted, self._verdict = version, asyncio.get_running_loop().create_future()

    def trust(self) -> None:
        """Deliver tokens of any version. After a rejection, only once no attempt runs any more."""
        self._doubted = None
        self._judge(True)

    def reject(self) -> None:
        """Let attempts end at their first token in doubt."""
        self._judge(False)

    def _judge(self, verdict: bool) -> None:
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(verdict)

    async def _accepted(self, part: Part) -> bool:
        """Return whether a part may be delivered, once that is known."""
        if self._doubted is None or self._doubted not in part.versions or self._verdict is None:
            return True
        return await asyncio.shield(self._verdict)

    async def settle(self) -> None:
        """Wait until every answer has had a token of the last weights, some seconds at most. Weights that come faster
        than sequences are computed again would otherwise stop all of them. Answers that are scored have their first
        token with their last."""
        owing = [call for call in self._calls if call.owed]
        seconds = _WHOLE_SECONDS if any(call.whole for call in owing) else _SETTLE_SECONDS
        deadline = self._clock.monotonic() + seconds
        while not self.held and any(call.owed for call in self._calls) and self._clock.monotonic() < deadline:
            await self._wait_moved(seconds)

    async def _wait_moved(self, seconds: float) -> None:
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()

    # ------------------------------------------------------------ one answer

    async def _serve(self, call: Call) -> None:
        try:
            while (finish := call.progress.over()) is None:
                while not self._open.is_set():
                    await self._open.wait()
                if call.whole and self._verdict is not None and not self._verdict.done():
                    await asyncio.shield(self._verdict)
                elif await self._attempt(call):
                    return
            call.push(Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=self._version(), finish=finish))
        except RillflowError as error:
            call.fail(error)
        except Exception as error:
            log.exception("an answer of the server could not be read")
            call.fail(error)
        finally:
            self._calls.discard(call)

    async def _attempt(self, call: Call) -> bool:
        """Return whether the answer has ended. Unless parts say their tokens' versions, all tokens of an attempt have
        the version at its beginning."""
        version = self._version()
        self._attempts.add(call)
        try:
            attempt = self._sample(call.progress.rest(), version)
            async with asyncio.timeout(None) as call.limit, aclosing(attempt) as parts:
                async for part in parts:
                    if not await self._accepted(part):
                        return False
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
        _check(part, version)
        for chunk in _chunks(part, finish, version):
            call.push(call.progress.take(chunk))
        self.generated += len(part.tokens)
        if call.owed and part.tokens:
            call.owed = False
            self._moved.set()


def _chunks(part: Part, finish: FinishReason | None, version: int) -> Iterator[Chunk]:
    """Yield a chunk for each run of tokens of one version; the last one has what ends the answer."""
    versions = part.versions or [version] * max(1, len(part.tokens))
    begin = 0
    for of, run in groupby(versions):
        end = begin + sum(1 for _ in run)
        last = end == len(versions)
        yield Chunk(
            tokens=part.tokens[begin:end],
            logprobs=part.logprobs[begin:end],
            raw_logprobs=part.raw_logprobs[begin:end],
            version=of,
            finish=finish if last else None,
            experts=part.experts if last else b"",
        )
        begin = end


def _check(part: Part, version: int) -> None:
    """Raise EngineError unless every token has two finite log-probs."""
    if part.versions and len(part.versions) != len(part.tokens):
        raise EngineError(
            f"the server returned {len(part.tokens)} tokens with {len(part.versions)} versions",
            "is it a tried release?",
        )
    if not len(part.tokens) == len(part.logprobs) == len(part.raw_logprobs):
        raise EngineError(
            f"the server returned {len(part.tokens)} tokens with {len(part.logprobs)} log-probs and "
            f"{len(part.raw_logprobs)} of the model's own",
            "is it a tried release?",
        )
    if not all(map(math.isfinite, [*part.logprobs, *part.raw_logprobs])):
        raise EngineError(f"version {version} gives log-probs that are not finite", "its weights are broken")
