"""One call at work, whatever dialect it came in: choices that sample below one given node.

When a call fails, all its nodes are abandoned and its draw is given back, so that the same call tried again is the
same draw; except what the engine itself had to cut off (`abort`), which stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rillflow.contracts import TokenSource
from rillflow.errors import ContextOverflow
from rillflow.gateway.choices import Choice, Keep, Piece
from rillflow.gateway.grammars import Calls, composed
from rillflow.gateway.reading.detokenise import Detokeniser
from rillflow.gateway.reading.formats import AUTO, reasoning_format, tool_format, written_calls
from rillflow.gateway.reading.reader import Reader
from rillflow.gateway.reading.reasoning import Thought
from rillflow.gateway.reading.stops import StopStrings
from rillflow.gateway.reading.tools import offered
from rillflow.gateway.sessions.keeping import Asked
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.texts import SHORT, TextThreads
from rillflow.gateway.trees.continuing import following
from rillflow.gateway.trees.messages import AnswerReading, Message, ToolCall, message
from rillflow.gateway.trees.placing import Place, RawPlace
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import Node
from rillflow.types import GenerateRequest, Grammar, Sampling

__all__ = ["Answer", "Call", "Choice", "Piece", "Policy", "begin", "begin_beside"]

_PIECES = 256  # of all choices of a call that may wait for their reader
_PROMPT_END = 16  # ids at the end of a prompt, in which it may open the reasoning


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asks for. `tools_key` tells equal tool lists; `live`: text is wanted while it is sampled.

    `previous` is the id of an answer of this session that `history` follows. A raw `prompt`, text or ids, stands in
    place of a history; its answer is text and nothing else. `agent` is whom of the episode's agents it is of.
    One of the tools named in `forced` must be called; empty where none must. Only those in `allowed` may be; None: any.
    `options` are the chat template's for this call.
    """

    policy: str
    history: list[Message]
    tools: Tools
    tools_key: bytes
    sampling: Sampling
    choices: int = 1
    stops: tuple[str, ...] = ()
    parse_tools: bool = False
    live: bool = False
    logprobs: bool = False
    previous: str | None = None
    prompt: str | list[int] | None = None
    agent: str = ""
    forced: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Policy:
    """What samples a policy, what speaks its tokens, and how its model writes tool calls and reasoning: by the names of
    formats, or `auto`. `tools` is None where the chat template has no place for tools, `reasoning` where the model does
    not reason. `name` is for errors."""

    def __init__(
        self,
        engine: TokenSource,
        renderer: Renderer,
        tools: str = AUTO,
        reasoning: str = AUTO,
        *,
        name: str = "NAME",
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.tools = tool_format(tools, renderer.template, f"policies.{name}")
        self.reasoning = reasoning_format(reasoning, renderer.template.source, f"policies.{name}")
        if self.tools is not None:
            renderer.template.write_calls = partial(written_calls, self.tools)

    def with_options(self, options: Mapping[str, Any]) -> Policy:
        """Return the policy with the chat template's options of one call."""
        if not options:
            return self
        made = copy(self)
        made.renderer = self.renderer.variant(options)
        return made

    def reading(self, tools: Tools) -> AnswerReading:
        """Return how this model's answers are read when `tools` were offered."""
        return AnswerReading(partial(self._read, tools), "" if self.reasoning is None else self.reasoning.open)

    def _read(self, tools: Tools, prompt: str, text: str, calls: bool) -> Message:
        """Return the message that an answer's text is, behind a prompt that ends so."""
        splitter = None if self.reasoning is None else self.reasoning.splitter(inside=self.reasoning.opened_by(prompt))
        parser = self.tools.parser(offered(tools)) if calls and self.tools is not None else None
        said: list[str] = []
        thought: list[str] = []
        made: list[ToolCall] = []
        for part in Reader(Detokeniser(self.renderer.decode, ()), None, splitter, parser).of_text(text):
            if isinstance(part, str):
                said.append(part)
            elif isinstance(part, Thought):
                thought.append(part.text)
            else:
                made.append(ToolCall(part.id, part.name, part.arguments))
        return message("assistant", "".join(said), made, reasoning="".join(thought))


class Answer:
    """All choices of one call. `show` is awaited before its first piece leaves, `keep` before a choice ends;
    `failed` is told once, when the agent will see none of them. Once all ends have left, nothing is taken back."""

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
        """The pieces of all choices, as they come."""
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
        """Until all choices have ended; for a call of which nothing is seen before."""
        try:
            async with aclosing(self._stream()) as stream:
                async for _ in stream:
                    pass
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The agent sees none of it, or not the end of all."""
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


def plain_temperature(sampling: Sampling) -> float:
    """The temperature that alone explains a draw's log-probs; 0 for greedy, cut and constrained distributions, where
    none does."""
    whole = sampling.top_p >= 1.0 and sampling.top_k == 0 and sampling.grammar is None
    return sampling.temperature if whole else 0.0


async def begin_beside(
    session: Session, policy: Policy, call: Call, id: str, created: int, *, texts: TextThreads
) -> Answer:
    """As `begin`, with long texts rendered and tokenised beside the event loop. The call has the session's turn."""
    while True:
        place = _place(session, policy, call)
        await texts.run(place.render, long=place.size > SHORT)
        if place.stands:
            break
    if call.forced or call.sampling.grammar is not None:  # what has been checked is remembered
        await texts.run(partial(_grammar, policy, call, None), long=len(call.tools_key) > SHORT)
    return begin(session, policy, call, id, created, place=place)


def begin(
    session: Session, policy: Policy, call: Call, id: str, created: int, *, place: Place | RawPlace | None = None
) -> Answer:
    """Find the call's place in the tree, unless it is given, and make its choices; nothing is sampled before
    `pieces`."""
    given = (place or _place(session, policy, call)).give()
    session.count(given)  # it is kept, whether or not there is room for an answer
    length = sum(len(node.tokens) for node in given.path())
    room = policy.engine.context - length
    if room < 1:
        raise _overflow(policy, length)
    prompt = given.prompt()
    inside = _inside(policy, call, prompt)
    grammar = _grammar(policy, call, inside)
    draw = session.draw(call.policy, prompt)
    seeds = session.seeds(draw, call.choices, call.sampling.seed)
    requests = [
        GenerateRequest(
            id=f"{id}_{index}",
            tokens=prompt,
            sampling=_sampling(policy, call, room, seed, grammar),
            group=session.group,
        )
        for index, seed in enumerate(seeds)
    ]
    choices = _choices(session, policy, call, given, requests, inside=inside)
    nodes = [choice.node for choice in choices]
    asked = Asked(id, call.policy, draw.number, call.choices, live=call.live)
    session.begun(asked, nodes)

    def failed() -> None:
        session.give_back(draw)
        session.abandoned(asked, nodes)

    show, keep = partial(session.shown, asked), partial(session.ended, asked)
    return Answer(id, created, prompt, choices, policy.engine, show=show, keep=keep, failed=failed)


def _overflow(policy: Policy, tokens: int) -> ContextOverflow:
    return ContextOverflow(f"this model's context is {policy.engine.context} tokens, the prompt has {tokens}")


def _choices(
    session: Session,
    policy: Policy,
    call: Call,
    given: Node,
    requests: list[GenerateRequest],
    *,
    inside: bool | None,
) -> list[Choice]:
    tree = session.tree(call.policy)
    choices = []
    for index, request in enumerate(requests):
        asked = request.sampling
        node = tree.sample(
            given, plain_temperature(asked), request.id, call.agent, constrained=asked.grammar is not None
        )
        reader = _reader(policy, call, inside)
        eager = call.live or bool(call.stops)
        choices.append(
            Choice(
                index,
                node,
                request,
                reader,
                eager=eager,
                logprobs=call.logprobs,
                unparsed=session.count_unparsed,
            )
        )
    return choices


def _place(session: Session, policy: Policy, call: Call) -> Place | RawPlace:
    tree = session.tree(call.policy)
    if call.prompt is None:
        history = call.history if call.previous is None else following(session, call.previous, call.history)
        return Place(tree, policy.renderer, history, call.tools, call.tools_key, reading=policy.reading(call.tools))
    if isinstance(call.prompt, list) and len(call.prompt) >= policy.engine.context:
        raise _overflow(policy, len(call.prompt))
    return RawPlace(tree, policy.renderer, call.prompt)


def _grammar(policy: Policy, call: Call, inside: bool | None) -> Grammar | None:
    """What the answer must look like, in this model's way of reasoning and of calling tools; None: as it likes."""
    asked = call.sampling.grammar
    if asked is None and not call.forced:
        return None
    calls = None
    names = call.forced or call.allowed
    if call.tools and call.parse_tools and names != () and policy.tools is not None:
        calls = Calls(call.tools, policy.tools, forced=bool(call.forced), names=names)
    return composed(asked, calls, inside, policy.renderer, policy.reasoning)


def _sampling(policy: Policy, call: Call, room: int, seed: int, grammar: Grammar | None) -> Sampling:
    return Sampling(
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        top_k=call.sampling.top_k,
        max_tokens=min(call.sampling.max_tokens, room),
        stop_tokens=policy.renderer.stop_tokens,
        seed=seed,
        grammar=grammar,
    )


def _inside(policy: Policy, call: Call, prompt: list[int]) -> bool | None:
    """Return whether the prompt has opened the reasoning; None for a model, or a raw prompt, without reasoning."""
    if call.prompt is not None or policy.reasoning is None:
        return None
    return policy.reasoning.opened_by(policy.renderer.decode(prompt[-_PROMPT_END:]))


def _reader(policy: Policy, call: Call, inside: bool | None) -> Reader:
    renderer, reasoning = policy.renderer, policy.reasoning
    parsed = policy.tools if call.parse_tools else None
    return Reader(
        Detokeniser(renderer.decode, renderer.stop_tokens),
        StopStrings(call.stops) if call.stops else None,
        None if inside is None or reasoning is None else reasoning.splitter(inside=inside),
        None if parsed is None else parsed.parser(offered(call.tools, call.allowed)),
    )
