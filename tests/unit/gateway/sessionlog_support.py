"""Random sessions played through the real calls, and what of them must outlive the process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gateway_support import Script, ScriptedEngine, chunk, make_renderer

from rillflow.errors import EngineError, RillflowError
from rillflow.gateway import Policy, Sessions
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call, begin
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.tree import Node
from rillflow.types import GenerateRequest, Sampling

RENDERER = make_renderer()
WORDS = ["hello", "abc", "né", "\n\n", "a b", "漢"]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


class Player:
    """Plays steps on the sessions of one gateway; every step that returns is acknowledged."""

    def __init__(self, folder: Path, seed: int, limit: int = 1 << 18) -> None:
        self.random = random.Random(seed)
        self.log = FileSessionLog(folder, limit=limit)
        self.sessions = Sessions("secret", log=self.log)
        self.restored = self.sessions.restore()
        self.engine = ScriptedEngine(choose=self._script)
        self.outcome = "answer"
        self.histories: dict[str, list[list[Message]]] = {}
        self._names = 0

    def open(self) -> str:
        self._names += 1
        name = f"s{self._names}"
        self.sessions.open(name, seed=self._names, group="g", deadline_seconds=900, detail={"lease": [name, 1.5]})
        self.histories[name] = [[]]
        return name

    async def step(self, names: Sequence[str]) -> str:
        """One thing that may happen to one of the sessions, whose name it returns."""
        name = self.random.choice(list(names))
        session = self.sessions.get(name)
        what = self.random.choices(["call", "reward", "note", "close"], [12, 2, 1, 0.5])[0]
        if what == "call" and not session.closed:
            await self.call(session)
        elif what == "reward":
            await session.reward(self.random.choice([0.0, 1.0]), policy=self.random.choice([None, "one"]))
        elif what == "close":
            self.sessions.end(name) if self.random.random() < 0.5 else self.sessions.close(name)
        else:
            self.sessions.note(name, {"lease": [name, self.random.random()]})
        return name

    async def call(self, session: Session) -> None:
        answer = self.begin(session)
        self.outcome = self.random.choice(["answer"] * 8 + ["error", "abort", "gone", "late"])
        try:
            if self.outcome == "gone":
                stream = answer.pieces()
                await anext(stream)
                await stream.aclose()
            else:
                await answer.whole()
            if self.outcome == "late":
                answer.abandon()
            elif self.outcome == "answer":
                self._remember(session, answer)
        except RillflowError:
            assert self.outcome in {"error", "abort"}

    def begin(self, session: Session, **changes: Any) -> Answer:
        known = self.histories[session.id]
        history = [*self.random.choice(known), *self._said()]
        tools = TOOLS if self.random.random() < 0.3 else None
        call = Call(
            policy=self.random.choice(["one", "one", "two"]),
            history=history,
            tools=tools,
            tools_key=b"tools" if tools else b"",
            sampling=Sampling(temperature=self.random.choice([1.0, 0.5]), max_tokens=64),
            choices=self.random.choice([1, 1, 1, 3]),
            live=self.random.random() < 0.4,
            parse_tools=tools is not None,
            agent="writer" if len(history) % 2 else "",
        )
        call = msgspec.structs.replace(call, **changes)
        self.last = call
        number = session.admit(self.sessions.limits, 0.0)
        return begin(session, Policy(self.engine, RENDERER), call, f"{session.id}c{number}", 1)

    def _said(self) -> list[Message]:
        word = self.random.choice(WORDS)
        kinds = [
            [message("user", word)],
            [message("user", word, name="ann"), message("user", "more")],
            [message("assistant", word, [ToolCall("t1", "look", '{"x": 1.0}')]), message("tool", word, call_id="t1")],
            [message("assistant", word, [ToolCall("t2", "look", "no json")], reasoning="hm"), message("user", word)],
        ]
        return self.random.choice(kinds)

    def _remember(self, session: Session, answer: Answer) -> None:
        choice = self.random.choice(answer.choices)
        path = [said for node in choice.node.path() for said in node.messages]
        self.histories[session.id].append(path)

    def _script(self, request: GenerateRequest) -> Script:
        if self.outcome == "error" and self.random.random() < 0.7:
            return [chunk([5, 6]), EngineError("broken")]
        ids = [self.random.randrange(200) for _ in range(self.random.randrange(1, 20))]
        cut = self.random.randrange(len(ids) + 1)
        version = self.random.randrange(3)
        last = chunk(ids[cut:], version + self.random.randrange(2), None if self.outcome == "abort" else "stop")
        script: Script = [chunk(ids[:cut], version), last]
        return [*script, None] if self.outcome == "hang" else script


# ---------------------------------------------------------------- what must be the same


def view(session: Session) -> dict[str, Any]:
    """All of a session that its log promises to keep."""
    return {
        "id": session.id,
        "key": session.key,
        "seed": session.seed,
        "group": session.group,
        "detail": dict(session.detail),
        "closed": session.closed,
        "until": session.until,
        "draws": {prompt: frozenset(numbers) for prompt, numbers in session.draws.items() if numbers},
        "rewards": sorted(session.rewards.state(), key=str),
        "nodes": nodes_of(session),
    }


def nodes_of(session: Session) -> dict[int, Any]:
    """Return the nodes on the paths to answers that an agent may have seen."""
    found: dict[int, Any] = {}
    for policy, tree in session.trees.items():
        for node in tree.nodes():
            if node.kind == "sampled" and node.usable and node.tokens:
                found |= {above.id: _node(policy, above) for above in node.path()}
    return found


def _node(policy: str, node: Node) -> tuple[Any, ...]:
    return (
        policy,
        node.kind,
        None if node.parent is None else node.parent.id,
        list(node.tokens),
        list(node.logprobs),
        list(node.raw_logprobs),
        list(node.versions),
        node.seams,
        node.temperature,
        node.finish,
        node.messages,
        node.call,
        node.agent,
        node.fork,
        node.canonical,
    )


def answers(session: Session) -> dict[str, tuple[int, ...]]:
    return {
        node.call: tuple(node.tokens)
        for tree in session.trees.values()
        for node in tree.nodes()
        if node.kind == "sampled" and node.usable and node.tokens
    }
