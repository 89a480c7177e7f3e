"""One answer being sampled: the engine's chunks go into its node, id for id, and are read into pieces.

A node whose choice does not reach its end is abandoned: nobody saw the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from rillflow.contracts import TokenSource
from rillflow.errors import Unavailable
from rillflow.gateway.reading.reader import Read, Reader
from rillflow.gateway.reading.reasoning import Thought
from rillflow.gateway.trees.messages import ToolCall, message
from rillflow.gateway.trees.tree import Node
from rillflow.types import Chunk, FinishReason, GenerateRequest

Keep = Callable[[Node], Awaitable[None]]


class Piece(NamedTuple):
    """Something new in a choice: text, reasoning, a whole tool call, or its end.

    `tokens` are those since the last piece, with their log-probs, where the call asked for log-probs.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    finish: FinishReason | None = None
    tokens: tuple[tuple[int, float], ...] = ()


class Choice:
    """After its last piece, `text`, `reasoning`, `calls`, `finish` and `stop` are the whole answer.

    With `eager`, pieces come while tokens are sampled; without, all at the end, which gives the same for less.
    `unparsed` is told how many texts look like calls of tools but cannot be parsed.
    """

    def __init__(
        self,
        index: int,
        node: Node,
        request: GenerateRequest,
        reader: Reader,
        *,
        eager: bool,
        logprobs: bool,
        unparsed: Callable[[int], None],
    ) -> None:
        self.index = index
        self.node = node
        self.request = request
        self.text = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.finish: FinishReason = "stop"
        self._reader = reader
        self._eager = eager
        self._logprobs = logprobs
        self._unparsed = unparsed
        self._shown = 0
        self._said: list[str] = []
        self._thought: list[str] = []

    @property
    def stop(self) -> str:
        """The agent's stop string that has cut the answer; empty where none has."""
        return self._reader.stop

    async def pieces(self, engine: TokenSource, keep: Keep) -> AsyncGenerator[Piece]:
        chunks = engine.generate(self.request)
        try:
            async for chunk in chunks:
                for piece in self._take(chunk):
                    yield piece
                if chunk.finish is not None or self.stop:
                    self.finish = "stop" if self.stop else chunk.finish or "stop"
                    break
            else:
                self.finish = "abort"
            pieces = self._end()
            # On disk before the agent can know that the answer has ended.
            await keep(self.node)
            for piece in pieces:
                yield piece
        finally:
            if self.node.finish is None:
                self.node.abandon()
            await _close(chunks)

    def _take(self, chunk: Chunk) -> list[Piece]:
        """Keep the chunk's tokens and read them. With stop strings, token by token and only up to the one that
        completes a stop string: how many the engine sent along with it is chance, and nobody saw them."""
        if not self._reader.stops:
            self.node.add(chunk)
            return self._pieces(self._reader.feed(chunk.tokens)) if self._eager else []
        pieces: list[Piece] = []
        for index, token in enumerate(chunk.tokens):
            self.node.add(_part(chunk, index))
            pieces += self._pieces(self._reader.feed((token,)))
            if self.stop:
                break
        return pieces

    def _end(self) -> list[Piece]:
        read = self._reader.finish() if self._eager else self._reader.whole(self.node.tokens)
        pieces = self._pieces(read)
        self._unparsed(self._reader.unparsed)
        self.text, self.reasoning = "".join(self._said), "".join(self._thought)
        self.node.end(self.finish, message("assistant", self.text, self.calls, reasoning=self.reasoning))
        if self.finish == "abort":
            raise Unavailable("the engine was stopped while it sampled this answer")
        return [*pieces, Piece(self.index, finish=self.finish, tokens=self._unshown())]

    def _pieces(self, read: list[Read]) -> list[Piece]:
        return [self._piece(part) for part in read]

    def _piece(self, part: Read) -> Piece:
        if isinstance(part, str):
            self._said.append(part)
            return Piece(self.index, text=part, tokens=self._unshown())
        if isinstance(part, Thought):
            self._thought.append(part.text)
            return Piece(self.index, reasoning=part.text, tokens=self._unshown())
        call = ToolCall(part.id or f"call_{self.request.id}_{len(self.calls)}", part.name, part.arguments)
        self.calls.append(call)
        return Piece(self.index, call=call, tokens=self._unshown())

    def _unshown(self) -> tuple[tuple[int, float], ...]:
        if not self._logprobs:
            return ()
        start, self._shown = self._shown, len(self.node.tokens)
        return tuple(zip(self.node.tokens[start:], self.node.logprobs[start:], strict=True))


def _part(chunk: Chunk, index: int) -> Chunk:
    """One token of a chunk."""
    here = slice(index, index + 1)
    return Chunk(
        tokens=chunk.tokens[here],
        logprobs=chunk.logprobs[here],
        raw_logprobs=chunk.raw_logprobs[here],
        version=chunk.version,
        seam=chunk.seam if index == 0 else "",
    )


async def _close(chunks: AsyncIterator[Chunk]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
