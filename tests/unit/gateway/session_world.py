"""Agents that do anything that agents do, in one session through the gateway's own calls, and what must hold after.

Every sampled token has a log-prob of its own, so that a trained token says which it is. Answers are sampled with ids
that the tokenizer would not choose, so that a token which was ever tokenised again shows.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from gateway_support import (
    CHATML,
    COUNTING,
    DEEPSEEK_LIKE,
    FORGETFUL,
    PLAIN,
    QWEN_LIKE,
    ScriptedEngine,
    make_renderer,
)

from rillflow.errors import Unavailable
from rillflow.gateway import Renderer, SessionRecord, Sessions
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call, Policy, begin
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.tree import TokenTree
from rillflow.types import Chunk, GenerateRequest, Sampling

RENDERERS = {
    "append-only": make_renderer(CHATML),
    "forgetful": make_renderer(FORGETFUL),
    "counting": make_renderer(COUNTING),
    "plain": make_renderer(PLAIN),
    "qwen": make_renderer(QWEN_LIKE),
    "deepseek": make_renderer(DEEPSEEK_LIKE),
}
WORDS = ("abc", "hello", "", "ab é€", "hellabc")
CALLING = 'x\n<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call>'
FOLLOWS = (("user",), ("tool",), ("user", "user"), ("tool", "user"), ())
POLICIES = ("one", "two")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ENDS = ("stop",) * 10 + ("length",) * 3 + ("abort", "break", "silent", "gone")
TOOLS_KEY = msgspec.json.encode(TOOLS)  # renderers are shared with other tests, which have other tools
UNIT = 1 / 8192  # log-probs are whole numbers of it: exact in float32


@dataclass(frozen=True)
class Answering:
    """How one choice is sampled: which word, its end, how many ids to a chunk, where weights change or it is cut."""

    word: int
    end: str
    step: int
    split: bool
    seam: str


@dataclass(frozen=True)
class Ask:
    talk: int
    answers: tuple[Answering, ...]
    follow: int
    keep_reasoning: bool


@dataclass(frozen=True)
class Change:
    """Not a call: the agent edits a message, replaces its history by a summary, or gets tools."""

    talk: int
    kind: str
    place: int


Move = tuple[Ask, ...] | Change


@dataclass(frozen=True)
class Talk:
    """What an agent holds of one conversation. `full` has the reasoning that it may have dropped.

    `exact`: the prompt's text must be the template's for `full`. It need not where a reasoning that the agent has
    dropped is behind something that no path has, or where calls of tools are written in the template's own way.
    """

    policy: str
    history: tuple[Message, ...] = ()
    full: tuple[Message, ...] = ()
    tools: bool = False
    exact: bool = True
    raw: str | tuple[int, ...] | None = None


@dataclass
class Sampled:
    """The engine's own log of a request."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    seams: int = 0


class World:
    def __init__(self, template: str) -> None:
        self.renderer: Renderer = RENDERERS[template]
        self.reasons = "</think>" in self.renderer.template.source
        self.sessions = Sessions("secret")
        self.sessions.open("s", seed=1, group="g", deadline_seconds=600)
        self.session = self.sessions.get("s")
        engine = ScriptedEngine(choose=self._choose)
        engine.context = 1 << 20
        self.policy = Policy(engine, self.renderer)
        self.talks = [self._fresh(policy, text) for policy in POLICIES for text in ("hello", "other")]
        self.talks += [Talk("one", raw="hello abc"), Talk("two", raw=(1, 2, 3))]
        self.plans: dict[str, Answering] = {}
        self.log: dict[str, Sampled] = {}
        self.seen: set[str] = set()
        self.cut_off: set[str] = set()
        self.given: dict[str, float] = {}
        self.version = 1
        self._count = self._changes = self._tokens = 0

    def _fresh(self, policy: str, text: str) -> Talk:
        said = (message("system", "rules"), message("user", text)) if policy == "one" else (message("user", text),)
        return Talk(policy, said, said)

    # ------------------------------------------------------------ the engine

    def _choose(self, request: GenerateRequest) -> list[Chunk | Exception | None]:
        """In the moment of sampling: the log has what the engine was given and what it gives."""
        plan = self.plans[request.id]
        log = self.log[request.id] = Sampled(list(request.tokens))
        ids = self._ids(plan, request.tokens)
        parts = [ids[at : at + plan.step] for at in range(0, len(ids), plan.step)] or [[]]
        script: list[Chunk | Exception | None] = []
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            script.append(self._chunk(log, part, plan, last=last))
            if plan.end in {"break", "gone"} and (last or place == 1):
                return [*script, RuntimeError("broken")]
        return script

    def _chunk(self, log: Sampled, part: list[int], plan: Answering, *, last: bool) -> Chunk:
        begun = bool(log.ids)
        seam = plan.seam if begun and plan.seam != "weights" else ""
        self.version += begun and plan.seam == "weights"
        changed = bool(seam) or (begun and part and log.versions[-1] != self.version)
        log.seams += bool(changed)
        made = [-(self._tokens + number + 1) * UNIT for number in range(len(part))]
        self._tokens += len(part)
        log.ids += part
        log.logprobs += made
        log.versions += [self.version] * len(part)
        finish = plan.end if last and plan.end in {"stop", "length", "abort"} else None
        return Chunk(
            tokens=part,
            logprobs=made,
            raw_logprobs=[2 * x for x in made],
            version=self.version,
            finish=finish,  # type: ignore[arg-type]
            seam=seam,
        )

    def _ids(self, plan: Answering, prompt: list[int]) -> list[int]:
        text = CALLING if plan.word == len(WORDS) else WORDS[plan.word]
        if self.reasons and plan.word % 2 == 0:
            opened = self.renderer.decode(prompt[-12:]).endswith("<think>\n")
            text = ("" if opened else "<think>\n") + f"hm {plan.word}\n</think>\n\n{text}"
        elif "ns.last" in self.renderer.template.source:
            text = f"<think>\n\n</think>\n\n{text}"  # what this template writes of an answer without reasoning
        encode = self.renderer.encode
        ids = [id for letter in text for id in encode(letter)] if plan.split else encode(text)
        end = self.renderer.end_token
        return [*ids, end] if plan.end == "stop" and end is not None else ids

    # ------------------------------------------------------------ the agents

    async def play(self, moves: list[Move]) -> SessionRecord:
        for move in moves:
            if isinstance(move, Change):
                self._change(move)
            else:
                await asyncio.gather(*(self._ask(ask) for ask in move))
        self.given = {call: float(number) for number, call in enumerate(sorted(self.seen))}
        for call, value in self.given.items():
            self.session.rewards.give(value, call=f"chatcmpl-{call}")
        return self.sessions.close("s")

    async def _ask(self, ask: Ask) -> None:
        talk = self.talks[ask.talk % len(self.talks)]
        self._count += 1
        id = f"c{self._count}"
        self.plans |= {f"{id}_{number}": plan for number, plan in enumerate(ask.answers)}
        gone = any(plan.end == "gone" for plan in ask.answers)
        answer = begin(self.session, self.policy, self._call(talk, len(ask.answers), live=gone), id, 0)
        self._right_prompt(talk, answer)
        with suppress(RuntimeError, Unavailable):
            await (_look_and_go(answer) if gone else answer.whole())
        if gone or any(choice.node.abandoned or choice.node.finish == "abort" for choice in answer.choices):
            self.cut_off |= {choice.node.call for choice in answer.choices if choice.node.finish == "abort"}
            return
        self.seen |= {choice.node.call for choice in answer.choices}
        self.talks += [self._continued(talk, choice, ask) for choice in answer.choices]

    def _call(self, talk: Talk, choices: int, *, live: bool) -> Call:
        raw = list(talk.raw) if isinstance(talk.raw, tuple) else talk.raw
        return Call(
            talk.policy,
            list(talk.history),
            TOOLS if talk.tools else None,
            TOOLS_KEY if talk.tools else b"",
            Sampling(temperature=0.5, max_tokens=1000),
            choices=choices,
            parse_tools=True,
            live=live,
            prompt=raw,
        )

    def _right_prompt(self, talk: Talk, answer: Answer) -> None:
        if isinstance(talk.raw, tuple):
            assert answer.prompt == list(talk.raw)
        elif talk.raw is not None:
            assert self.renderer.decode(answer.prompt) == talk.raw
        elif talk.exact:
            tools = TOOLS if talk.tools else None
            whole = self.renderer._text([said.body for said in talk.full], tools, prompt=True)
            assert self.renderer.decode(answer.prompt) == whole

    def _continued(self, talk: Talk, choice: Any, ask: Ask) -> Talk:
        if isinstance(talk.raw, tuple):
            more = tuple(self.renderer.encode("abc\n"))
            return replace(talk, raw=(*choice.request.tokens, *choice.node.tokens, *more[: ask.follow]))
        if talk.raw is not None:
            shown = self.renderer.decode(choice.node.tokens) if ask.keep_reasoning else choice.text
            return replace(talk, raw=talk.raw + shown + ("", " abc\n", "hello", "\n", "é")[ask.follow])
        follow = tuple(message(role, f"{role} {ask.follow}") for role in FOLLOWS[ask.follow])
        full = message("assistant", choice.text, choice.calls, reasoning=choice.reasoning)
        kept = choice.reasoning if ask.keep_reasoning else ""
        said = message("assistant", choice.text, choice.calls, reasoning=kept)
        exact = talk.exact and not choice.calls
        return replace(talk, history=(*talk.history, said, *follow), full=(*talk.full, full, *follow), exact=exact)

    def _change(self, change: Change) -> None:
        talk = self.talks[change.talk % len(self.talks)]
        if talk.raw is not None:
            return
        self._changes += 1
        history = list(talk.history)
        if change.kind == "edit":
            at = change.place % len(history)
            history[at] = message(history[at].role, f"edited {self._changes}")
        elif change.kind == "compact":
            history = [message("user", f"so far {self._changes}"), *history[-(change.place % 3) :]]
        tools = talk.tools or change.kind == "tools"
        exact = not self.reasons and talk.exact
        self.talks.append(replace(talk, history=tuple(history), full=tuple(history), tools=tools, exact=exact))


async def _look_and_go(answer: Answer) -> None:
    async with aclosing(answer.pieces()) as pieces:
        with suppress(StopAsyncIteration):
            await anext(pieces)


# ---------------------------------------------------------------- what must hold


def check(world: World, record: SessionRecord) -> None:
    owners = {
        round(-logprob / UNIT): (call, number)
        for call, log in world.log.items()
        for number, logprob in enumerate(log.logprobs)
    }
    trained: set[tuple[str, int]] = set()
    for policy in POLICIES:
        rows = record.samples(policy)
        assert len(rows) == len(record.trees.get(policy, TokenTree()).leaves())
        for row in rows:
            here = _check_row(world, row, owners)
            assert here
            assert trained.isdisjoint(here), "trained twice"
            trained |= here
    seen = {(call, number) for call in world.seen for number in range(len(world.log[call].ids))}
    assert seen <= trained, "an answer that an agent saw does not train"
    for call in {call for call, _ in trained - seen} - world.cut_off:
        # Its call failed, but another agent said the same words and was given these ids: they were seen after all.
        whole = world.log[call].prompt + world.log[call].ids
        assert any(log.prompt[: len(whole)] == whole for log in world.log.values()), "trains, but nobody saw it"


def _check_row(world: World, row: Any, owners: dict[int, tuple[str, int]]) -> set[tuple[str, int]]:
    columns = {name: column.tolist() for name, column in row.columns.items()}
    here: set[tuple[str, int]] = set()
    for at, masked in enumerate(columns["mask"]):
        if not masked:
            assert (columns["logprobs"][at], columns["raw_logprobs"][at], columns["temperatures"][at]) == (0, 0, 0)
            assert columns["versions"][at] == -1
            continue
        call, number = owners[round(-columns["logprobs"][at] / UNIT)]
        log = world.log[call]
        here.add((call, number))
        assert columns["tokens"][at] == log.ids[number]
        assert columns["raw_logprobs"][at] == 2 * log.logprobs[number]
        assert columns["versions"][at] == log.versions[number]
        assert columns["temperatures"][at] == 0.5
        if number == 0:
            assert columns["tokens"][:at] == log.prompt, "not what the engine was given"
        else:
            assert (call, number - 1) in here, "an answer in pieces"
        if number == len(log.ids) - 1 and call in world.given:
            assert columns["rewards"][at] == world.given[call]
    calls = {call for call, _ in here}
    rewards = columns.get("rewards", [])
    assert sum(not math.isnan(value) for value in rewards) == len(calls & world.given.keys())
    assert sum(len(world.log[call].ids) for call in calls) == len(here)
    assert row.seams == sum(world.log[call].seams for call in calls)
    return here
