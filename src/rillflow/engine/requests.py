"""A request at an engine: its checks, its progress, and the stream that its caller reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import takewhile

import msgspec

from rillflow.errors import BadRequest, ContextOverflow, EngineError, EngineLost
from rillflow.types import LOWEST_TEMPERATURE, Chunk, FinishReason, GenerateRequest, Grammar


def check_request(request: GenerateRequest, *, context: int, vocabulary: int) -> None:
    """Raise ContextOverflow if the prompt leaves no room for one token, EngineError if a value is out of range."""
    tokens, sampling = request.tokens, request.sampling
    if len(tokens) >= context:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens, the context {context}: no room for one more",
            "shorten the prompt or raise the engine's context",
        )
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineError(f"a prompt needs token ids from 0 to {vocabulary - 1}", "is it the model's own tokenizer?")
    if (
        sampling.max_tokens < 1
        or sampling.top_k < 0
        or not (sampling.temperature >= 0.0 and 0.0 < sampling.top_p <= 1.0)
    ):
        raise EngineError(
            f"sampling out of range: {sampling}",
            "max_tokens is at least 1, temperature and top_k at least 0, top_p in (0, 1]",
        )
    if 0.0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"temperature {sampling.temperature} is not supported", f"it is 0 or at least {LOWEST_TEMPERATURE}"
        )


def llguidance_grammar(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form: the embedded engine samples under it, and a gateway checks it before."""
    import llguidance

    if grammar.kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    return llguidance.LLMatcher.grammar_from_lark(grammar.text)


class Progress:
    """How far an answer is that may be cut and continued, at this engine or another: the tokens that it has, and the
    request for the rest."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.produced: list[int] = []
        self.cuts = 0  # since the last token
        self.losses = 0  # of them, those by an engine that was lost
        self.cause = ""
        self._request = request
        self._context = context

    def take(self, chunk: Chunk) -> Chunk:
        """Add a chunk; return it as the caller gets it, with the cause of the cut before it."""
        if not chunk.tokens:
            return chunk
        seam = self.cause if self.cause and self.produced else chunk.seam
        self.produced += chunk.tokens
        self.cause, self.cuts, self.losses = "", 0, 0
        return chunk if seam == chunk.seam else msgspec.structs.replace(chunk, seam=seam)

    def rest(self) -> GenerateRequest:
        """Return the request for the tokens that are missing."""
        if not self.produced:
            return self._request
        asked = self._request.sampling
        sampling = msgspec.structs.replace(asked, max_tokens=asked.max_tokens - len(self.produced))
        return msgspec.structs.replace(
            self._request,
            tokens=[*self._request.tokens, *self.produced],
            sampling=sampling,
            begun=self._request.begun + len(self.produced),
        )

    def over(self) -> FinishReason | None:
        """Return how the answer has ended, if it was cut after its last token but before the engine said so."""
        if not self.produced:
            return None
        asked = self._request.sampling
        if self.produced[-1] in asked.stop_tokens:
            return "stop"
        full = len(self._request.tokens) + len(self.produced) >= self._context
        return "length" if full or len(self.produced) >= asked.max_tokens else None


class Stream:
    """The chunks of one request, in order. Closing or dropping it aborts the request. A slow reader never delays the
    engine: it finds the waiting tokens merged into one chunk per version."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._chunks: deque[Chunk] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._done = False

    def push(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the request with this error, after the chunks that were pushed before."""
        self._error = error
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        while not self._chunks and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._chunks:
            chunk = self._pop()
            self._done = chunk.finish is not None
            return chunk
        self._done = True
        # Each caller gets its own error object: a shared one would collect the tracebacks of all callers.
        if isinstance(self._error, EngineError | BadRequest):
            raise type(self._error)(self._error.message, self._error.hint) from self._error
        raise EngineLost(f"a step of the engine failed: {self._error!r}", "see its cause") from self._error

    async def aclose(self) -> None:
        self._done = True
        self._chunks.clear()
        self._abort()

    def __del__(self) -> None:
        self._abort()

    def _pop(self) -> Chunk:
        """Return the waiting tokens of one version as one chunk; a seam always begins a chunk."""
        first = self._chunks.popleft()
        same = [first, *takewhile(lambda chunk: chunk.version == first.version and not chunk.seam, self._chunks)]
        for _ in same[1:]:
            self._chunks.popleft()
        if len(same) == 1:
            return same[0]
        return Chunk(
            tokens=[token for chunk in same for token in chunk.tokens],
            logprobs=[value for chunk in same for value in chunk.logprobs],
            raw_logprobs=[value for chunk in same for value in chunk.raw_logprobs],
            version=first.version,
            finish=same[-1].finish,
            seam=first.seam,
            experts=same[-1].experts,
        )
