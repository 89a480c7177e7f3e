"""One call at work, whatever dialect it came in: choices that sample below one given node.

A choice turns the engine's chunks into pieces (text, tool calls) while every id goes into its node as it comes. A
node whose choice does not reach its end is abandoned: nobody saw the answer. When a call fails, so are the others
of its nodes, except what the engine itself had to cut off (`abort`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from rillflow.contracts import TokenSource
from rillflow.errors import ContextOverflow, Unavailable
from rillflow.gateway.detokenise import Detokeniser
from rillflow.gateway.messages import Message, ToolCall, message
from rillflow.gateway.placing import place
from rillflow.gateway.render import Renderer, Tools
from rillflow.gateway.session import Session
from rillflow.gateway.tools import ParsedCall, StopStrings, ToolParser
from rillflow.gateway.tree import Node
from rillflow.types import Chunk, FinishReason, GenerateRequest, Sampling


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asks for. `tools_key` tells equal tool lists; `live`: text is wanted while it is sampled."""

    policy: str
    history: list[Message]
    tools: Tools
    tools_key: bytes
    sampling: Sampling
    choices: int = 1
    stops: tuple[str, ...] = ()
    parse_tools: bool = False
    live: bool = False


class Piece(NamedTuple):
    """Something new in a choice: text, a whole tool call, or its end, with the tokens since the last piece."""

    choice: int
    text: str = ""
    call: ToolCall | None = None
    finish: FinishReason | None = None
    tokens: tuple[tuple[int, float], ...] = ()


class Policy(NamedTuple):
    """What samples a policy, what speaks its tokens, and how its model writes tool calls and reasoning."""

    engine: TokenSource
    renderer: Renderer
    tools: str = "auto"
    reasoning: str = "auto"


class Choice:
    """One answer being sampled. After its last piece, `text`, `calls` and `finish` are the whole answer."""

    def __init__(
        self,
        index: int,
        node: Node,
        policy: Policy,
        request: GenerateRequest,
        call: Call,
        *,
        keep: Callable[[Node], Awaitable[None]],
    ) -> None:
        self.index = index
        self.node = node
        self.text = ""
        self.calls: list[ToolCall] = []
        self.finish: FinishReason = "stop"
        self.stop_tokens = frozenset(policy.renderer.stop_tokens)
        self._engine = policy.engine
        self._keep = keep
        self._request = request
        self._stops = StopStrings(call.stops) if call.stops else None
        self._parser = ToolParser() if call.parse_tools else None
        self._detokeniser = Detokeniser(policy.renderer.decode, self.stop_tokens)
        # Without anyone reading along, decoding once at the end gives the same text for less.
        self._eager = call.live or bool(call.stops)
        self._shown = 0

    async def pieces(self) -> AsyncGenerator[Piece]:
        chunks = self._engine.generate(self._request)
        try:
            async for chunk in chunks:
                for piece in self._take(chunk):
                    yield piece
                if chunk.finish is not None or self._cut:
                    self.finish = "stop" if self._cut else chunk.finish or "stop"
                    break
            else:
                self.finish = "abort"
            pieces = self._end()
            # On disk before the agent can know that the answer has ended.
            await self._keep(self.node)
            for piece in pieces:
                yield piece
        finally:
            if self.node.finish is None:
                self.node.abandon()
            await _close(chunks)

    @property
    def _cut(self) -> bool:
        return self._stops is not None and self._stops.hit

    def _take(self, chunk: Chunk) -> list[Piece]:
        """Keep the chunk's tokens and read them. With stop strings, token by token and only up to the one that
        completes a stop string: how many the engine sent along with it is chance, and nobody saw them."""
        if self._stops is None:
            self.node.add(chunk)
            return self._pieces(self._detokeniser.feed(chunk.tokens), last=False) if self._eager else []
        pieces: list[Piece] = []
        for index, token in enumerate(chunk.tokens):
            self.node.add(_part(chunk, index))
            pieces += self._pieces(self._detokeniser.feed([token]), last=False)
            if self._cut:
                break
        return pieces

    def _end(self) -> list[Piece]:
        text = "" if self._eager else self._detokeniser.feed(self.node.tokens)
        pieces = self._pieces(text + self._detokeniser.finish(), last=True)
        self.node.end(self.finish, message("assistant", self.text, self.calls))
        if self.finish == "abort":
            raise Unavailable("the engine was stopped while it sampled this answer")
        return [*pieces, Piece(self.index, finish=self.finish, tokens=self._unshown())]

    def _pieces(self, text: str, *, last: bool) -> list[Piece]:
        if self._stops is not None:
            if self._stops.hit:
                text = ""
            else:
                text = self._stops.feed(text)
                text += self._stops.finish() if last and not self._stops.hit else ""
        if self._parser is None:
            return [self._said(text)] if text else []
        parsed = self._parser.feed(text) + (self._parser.finish() if last else [])
        return [self._called(part) if isinstance(part, ParsedCall) else self._said(part) for part in parsed]

    def _said(self, text: str) -> Piece:
        self.text += text
        return Piece(self.index, text=text, tokens=self._unshown())

    def _called(self, parsed: ParsedCall) -> Piece:
        number = len(self.calls)
        call = ToolCall(f"call_{self._request.id}_{number}", parsed.name, parsed.arguments)
        self.calls.append(call)
        return Piece(self.index, call=call, tokens=self._unshown())

    def _unshown(self) -> tuple[tuple[int, float], ...]:
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
    )


async def _close(chunks: AsyncIterator[Chunk]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


class Answer:
    """All choices of one call; `failed` is told when the agent will see none of them."""

    def __init__(
        self, id: str, created: int, prompt_tokens: int, choices: list[Choice], failed: Callable[[], None]
    ) -> None:
        self.id = id
        self.created = created
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self._failed = failed

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.node.tokens) for choice in self.choices)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The pieces of all choices, as they come."""
        try:
            async with aclosing(_merged(self.choices) if self.choices[1:] else self.choices[0].pieces()) as stream:
                async for piece in stream:
                    yield piece
        except BaseException:
            self.abandon()
            raise

    async def whole(self) -> None:
        """Until all choices have ended."""
        async with aclosing(self.pieces()) as stream:
            async for _ in stream:
                pass

    def abandon(self) -> None:
        """The agent sees none of it."""
        self._failed()
        for choice in self.choices:
            if choice.node.finish != "abort":
                choice.node.abandon()


async def _merged(choices: list[Choice]) -> AsyncGenerator[Piece]:
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def run(choice: Choice) -> None:
        try:
            async with aclosing(choice.pieces()) as stream:
                async for piece in stream:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(choice)) for choice in choices]
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


def plain_temperature(sampling: Sampling) -> float:
    """The temperature that alone explains a draw's log-probs; 0 for greedy and cut distributions, where none does."""
    return sampling.temperature if sampling.top_p >= 1.0 and sampling.top_k == 0 else 0.0


def begin(session: Session, policy: Policy, call: Call, id: str, created: int) -> Answer:
    """Find the call's place in the tree and make its choices; nothing is sampled before `pieces`."""
    tree = session.tree(call.policy)
    given = place(tree, policy.renderer, call.history, call.tools, call.tools_key)
    prompt = given.prompt()
    room = policy.engine.context - len(prompt)
    if room < 1:
        raise ContextOverflow(
            f"this model's context is {policy.engine.context} tokens, the messages have {len(prompt)}"
        )
    draw = session.draw(call.policy, prompt)

    async def keep(node: Node) -> None:
        await session.log.ended(session, call.policy, node)

    choices = []
    for index, seed in enumerate(session.seeds(draw, call.choices, call.sampling.seed)):
        sampling = Sampling(
            temperature=call.sampling.temperature,
            top_p=call.sampling.top_p,
            top_k=call.sampling.top_k,
            max_tokens=min(call.sampling.max_tokens, room),
            stop_tokens=policy.renderer.stop_tokens,
            seed=seed,
        )
        request = GenerateRequest(id=f"{id}_{index}", tokens=prompt, sampling=sampling, group=session.group)
        node = tree.sample(given, plain_temperature(sampling), request.id)
        session.log.begun(session, call.policy, node, live=call.live)
        choices.append(Choice(index, node, policy, request, call, keep=keep))
    return Answer(id, created, len(prompt), choices, lambda: session.give_back(draw))
