"""From a call to its answers: find the call's place in the session's token tree, and begin an answer for each choice.

Nothing here depends on the dialect in which the call came. When a call fails, its draw is given back, so that the same
call tried again is the same draw.

Rendering and tokenising take time that grows with the text, so a text that cannot fit into the model's context is
refused by its length alone. Tokenising megabytes takes seconds, in which the tokenizer releases the interpreter lock,
so it runs in a thread and other sessions go on. A short text stays on the event loop, because a thread would take
longer.

The work in a thread changes nothing in a session. It is done under the session's `turn`: a session has one text in a
thread at a time, so that no session takes all threads, and its calls are placed in the order in which they came. Work
that has begun cannot be cancelled; a call whose client has gone keeps its session's turn until its thread is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any, TypeVar

import msgspec

from rillflow.contracts import TokenSource
from rillflow.errors import ContextOverflow
from rillflow.gateway.answers import Answer, Choice
from rillflow.gateway.grammars import Calls, composed
from rillflow.gateway.reading import AUTO, Reader, reasoning_format, tool_format, written_calls
from rillflow.gateway.reading.incremental import Detokeniser, StopStrings
from rillflow.gateway.reading.reasoning import Thought
from rillflow.gateway.reading.tools import offered
from rillflow.gateway.sessions.events import Asked
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.matching import Place, RawPlace, following
from rillflow.gateway.trees.messages import AnswerReading, Message, ToolCall, message
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import Node
from rillflow.types import GenerateRequest, Grammar, Sampling
from rillflow.wire import in_thread, take_short_turns

_PROMPT_END = 16  # ids at the end of a prompt in which it may open the reasoning
SHORT = 4 << 10  # most bytes of a text that is tokenised on the event loop, in at most 2 ms
SHORT_BODY = 128 << 10  # most bytes of a request that is decoded there
THREADS = 2

Result = TypeVar("Result")


class Call(msgspec.Struct, frozen=True):
    """One request of an agent, whatever its dialect.

    `tools_key` is equal for equal tools and options. `live`: the agent gets text while it is sampled. `previous` is the
    id of the answer that `history` follows, if the call named one. A raw `prompt`, text or ids, replaces the history;
    its answer is plain text. `agent` is the name of the episode's agent that made the call. One of the tools in
    `forced` must be called (empty: none must), and only those in `allowed` may be (None: any). `options` are the chat
    template's options for this call.
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
    options: Mapping[str, Any] = {}


class Policy:
    """One policy: the engine that samples it, its renderer, and the formats of its tool calls and reasoning.

    Formats are given by name, or `auto`. `self.tools` is None if the chat template has no place for tools,
    `self.reasoning` if the model does not reason. `name` is for errors.
    """

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
        """Return this policy with the chat template options of one call."""
        if not options:
            return self
        made = copy(self)
        made.renderer = self.renderer.variant(options)
        return made

    def reading(self, tools: Tools) -> AnswerReading:
        """Return how this model's answers are read when `tools` were offered."""
        return AnswerReading(partial(self._read, tools), "" if self.reasoning is None else self.reasoning.open)

    def _read(self, tools: Tools, prompt: str, text: str, calls: bool) -> Message:
        """Return the message for the text of an answer; `prompt` is the end of its prompt."""
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


def plain_temperature(sampling: Sampling) -> float:
    """Return the temperature if it alone explains the log-probs; 0 for greedy, truncated or constrained sampling."""
    whole = sampling.top_p >= 1.0 and sampling.top_k == 0 and sampling.grammar is None
    return sampling.temperature if whole else 0.0


async def begin_in_thread(
    session: Session, policy: Policy, call: Call, id: str, created: int, *, texts: TextThreads
) -> Answer:
    """Begin a call, with long texts rendered and tokenised in a thread. The caller holds the session's turn."""
    while True:
        place = _place(session, policy, call)
        await texts.run(place.render, long=place.size > SHORT)
        if place.stands:
            break
    if call.forced or call.sampling.grammar is not None:  # the result of the check is cached for `begin`
        await texts.run(partial(_grammar, policy, call, None), long=len(call.tools_key) > SHORT)
    return begin(session, policy, call, id, created, place=place)


def begin(
    session: Session, policy: Policy, call: Call, id: str, created: int, *, place: Place | RawPlace | None = None
) -> Answer:
    """Find the call's place in the tree, unless it is given, and make its choices. Reading them begins the sampling."""
    given = (place or _place(session, policy, call)).give()
    session.count(given)  # it stays in the tree even if the answer has no room
    ids = given.ids()
    prompt = ids.tolist()
    room = policy.engine.context - len(prompt)
    if room < 1:
        raise _overflow(policy, len(prompt))
    inside = _opened(policy, call, prompt)
    grammar = _grammar(policy, call, inside)
    draw = session.draw(call.policy, ids)
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
        history = call.history if call.previous is None else following(session.trees, call.previous, call.history)
        return Place(tree, policy.renderer, history, call.tools, call.tools_key, reading=policy.reading(call.tools))
    if isinstance(call.prompt, list) and len(call.prompt) >= policy.engine.context:
        raise _overflow(policy, len(call.prompt))
    return RawPlace(tree, policy.renderer, call.prompt)


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


# ---------------------------------------------------------------- the model's formats


def _grammar(policy: Policy, call: Call, inside: bool | None) -> Grammar | None:
    """Return the grammar of the answer in the formats of this model; None for a free answer."""
    asked = call.sampling.grammar
    if asked is None and not call.forced:
        return None
    calls = None
    names = call.forced or call.allowed
    if call.tools and call.parse_tools and names != () and policy.tools is not None:
        calls = Calls(call.tools, policy.tools, forced=bool(call.forced), names=names)
    return composed(asked, calls, inside, policy.renderer, policy.reasoning)


def _opened(policy: Policy, call: Call, prompt: list[int]) -> bool | None:
    """Return whether the prompt has opened the reasoning; None for a raw prompt, or a model without reasoning."""
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


# ------------------------------------------------------------ long texts


class TextThreads:
    """The threads of one gateway. They start with the first long text."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "gateway-texts")

    async def run(self, work: Callable[[], Result], *, long: bool) -> Result:
        """Return the result of `work`, run in a thread if it is `long`. The caller holds its session's turn."""
        if not long:
            return work()
        take_short_turns()
        return await in_thread(work, self._pool)

    def close(self) -> None:
        """Drop work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def refuse_too_long(request: msgspec.Struct, size: int, renderer: Renderer, context: int) -> None:
    """Raise ContextOverflow if the text of a request, decoded from `size` bytes, cannot fit into `context` tokens.

    Everything in the request counts, whatever its dialect and field, so a new field is counted too. A body has at least
    as many bytes as characters, so the characters of a short one are not counted.
    """
    most = renderer.characters_of(context)
    if size >= most and _characters(request, most) >= most:
        raise ContextOverflow(
            f"this model's context is {context} tokens, and a request with {most} characters cannot fit"
        )


def _characters(value: Any, most: int) -> int:
    """Count the characters of all texts in `value`, with numbers and keys of JSON objects, up to about `most`."""
    counted = 0
    left = [value]
    while left and counted < most:
        part = left.pop()
        if isinstance(part, str):
            counted += len(part)
        elif isinstance(part, dict):
            left += part
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, msgspec.Struct):
            left += [getattr(part, name) for name in part.__struct_fields__]
        elif part is not None:
            counted += 1
    return counted
