"""The answers of one call: the engine's chunks are added to nodes, id for id, and read into pieces.

A choice that does not reach its end is abandoned, because its agent did not see the answer. When a call fails, all its
choices are abandoned, except those that the engine itself aborted, which stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple

from rillflow.contracts import TokenSource
from rillflow.errors import Unavailable
from rillflow.gateway.reading import Read, Reader
from rillflow.gateway.reading.reasoning import Thought
from rillflow.gateway.trees.messages import ToolCall, message
from rillflow.gateway.trees.tree import Node
from rillflow.types import Chunk, FinishReason, GenerateRequest

_PIECES = 256  # of all choices of a call that may wait for their reader

Keep = Callable[[Node], Awaitable[None]]


class Piece(NamedTuple):
    """Something new in a choice: text, reasoning, a whole tool call, or its end.

    `tokens` are those since the last piece, with their log-probs, if the call asked for log-probs.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    finish: FinishReason | None = None
    tokens: tuple[tuple[int, float], ...] = ()


class Choice:
    """One answer. After its last piece, `text`, `reasoning`, `calls`, `finish` and `stop` are the whole answer.

    With `eager`, pieces come while tokens are sampled; else all come at the end, which costs less. `unparsed` is called
    with the number of texts that look like tool calls but cannot be parsed.
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
        """The agent's stop string that cut the answer; empty if none did."""
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
            # The answer must be on disk before the agent sees its end.
            await keep(self.node)
            for piece in pieces:
                yield piece
        finally:
            if self.node.finish is None:
                self.node.abandon()
            await _close(chunks)

    def _take(self, chunk: Chunk) -> list[Piece]:
        """Add the chunk's tokens to the node and read them.

        With stop strings, tokens are taken one by one up to the one that completes a stop string. Tokens that the
        engine sent after it are dropped: their number is arbitrary, and no agent sees them.
        """
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
            raise Unavailable("the engine stopped while it sampled this answer")
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
    """Return one token of a chunk as a chunk."""
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


# ---------------------------------------------------------------- all choices of a call


class Answer:
    """All choices of one call.

    `show` is awaited before the first piece is returned, `keep` before a choice ends. `failed` is called once if the
    agent does not see the whole answer. Once the ends of all choices were returned, nothing is abandoned.
    """

    def __init__(
        self,
        id: str,
        created: int,
        prompt: list[int],
        choices: list[Choice],
        engine: TokenSource,
        *,
        show: Callable[[], Awaitable[None]],
        keep: Keep,
        failed: Callable[[], None],
    ) -> None:
        self.id = id
        self.created = created
        self.prompt = prompt
        self.choices = choices
        self._engine = engine
        self._show = show
        self._keep = keep
        self._failed: Callable[[], None] | None = failed
        self._ended = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.node.tokens) for choice in self.choices)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield the pieces of all choices as they arrive."""
        left = len(self.choices)
        try:
            async with aclosing(self._stream()) as stream:
                shown = False
                async for piece in stream:
                    if not shown:
                        await self._show()
                        shown = True
                    left -= piece.finish is not None
                    self._ended = left == 0
                    yield piece
        except BaseException:
            self.abandon()
            raise

    async def whole(self) -> None:
        """Wait until all choices have ended, for a call that shows nothing before."""
        try:
            async with aclosing(self._stream()) as stream:
                async for _ in stream:
                    pass
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Abandon the call: the agent does not see the end of all choices."""
        if self._ended:
            return
        for choice in self.choices:
            if choice.node.finish != "abort":
                choice.node.abandon()
        failed, self._failed = self._failed, None
        if failed is not None:
            failed()

    def _stream(self) -> AsyncGenerator[Piece]:
        streams = [choice.pieces(self._engine, self._keep) for choice in self.choices]
        return _merged(streams) if streams[1:] else streams[0]


async def _merged(streams: list[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(_PIECES)

    async def run(stream: AsyncGenerator[Piece]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(run(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
