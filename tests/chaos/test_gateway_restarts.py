"""A gateway is killed again and again under agents that know nothing of it: their sessions go on, no answer is lost."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from gateway_process import HELD

from rillflow.gateway import Sessions, session_url
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog

pytestmark = pytest.mark.chaos
KILLS = 5
STREAMING = 4  # of the sessions
TOKEN = "the run's token"
Tokens = list[tuple[str, float]]


class Lives:
    """The lives of one gateway, each ended by kill -9."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def load(cls, folder: Path, port: int) -> Lives:
        pipe = asyncio.subprocess.PIPE
        script = Path(__file__).with_name("gateway_process.py")
        command = [sys.executable, str(script), str(folder), str(port)]
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def next(self) -> dict[str, str]:
        """Kill it, if it lives, and start it again; returns the keys of its sessions."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        await self._process.stdin.drain()
        async with asyncio.timeout(60):
            keys: dict[str, str] = json.loads(await self._process.stdout.readline())
        return keys

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(30):
            await self._process.wait()


@dataclass
class Agent:
    """Plays one session with the provider's own client, and writes down what it was given."""

    client: openai.AsyncOpenAI
    given: dict[str, Tokens] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    seeing: asyncio.Event = field(default_factory=asyncio.Event)
    cut: bool = False
    seen: Tokens = field(default_factory=list)  # of the answer that was cut

    def __post_init__(self) -> None:
        self._history: list[dict[str, str]] = [{"role": "user", "content": "begin"}]

    async def play(self, stop: asyncio.Event) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            choices = 3 if turn % 5 == 0 else 1
            answer = await self.client.chat.completions.create(
                model="policy", messages=self._history, n=choices, logprobs=True
            )
            for choice in answer.choices:
                name = f"{answer.id.removeprefix('chatcmpl-')}_{choice.index}"
                self.given[name] = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
            self.told.set()
            self._go_on(turn, answer.choices[-1].message.content or "")

    async def stream(self, stop: asyncio.Event, *, held_after: int = 0) -> None:
        """A stream that is cut cannot be tried again by the client: this agent gives up then.

        After `held_after` answers, where given, it asks for one that never ends.
        """
        turn = 0
        while not stop.is_set() and not self.cut:
            turn += 1
            tokens = self.seen = []
            held = held_after and turn > held_after
            stream = await self.client.chat.completions.create(
                model="policy",
                messages=self._history,
                logprobs=True,
                stream=True,
                max_tokens=HELD if held else openai.omit,
            )
            try:
                async for event in stream:
                    for choice in event.choices:
                        shown = choice.logprobs.content if choice.logprobs else None
                        tokens += [(entry.token, entry.logprob) for entry in shown or ()]
                    if held and tokens:
                        self.seeing.set()
            except (openai.APIError, OSError):
                self.cut = True
                return
            self.given[f"{event.id.removeprefix('chatcmpl-')}_0"] = tokens
            self._go_on(turn, "".join(token for token, _ in tokens))

    def _go_on(self, turn: int, said: str) -> None:
        self._history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"turn {turn}"}]
        if turn % 12 == 0:
            self._history = [{"role": "user", "content": f"anew {turn}"}]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_sessions_outlive_a_gateway_that_is_killed_again_and_again(tmp_path: Path) -> None:
    port = free_port()
    lives = await Lives.load(tmp_path, port)
    keys = await lives.next()
    agents = {name: Agent(client(port, name, key)) for name, key in keys.items()}
    stop = asyncio.Event()
    held, *others = agents.values()
    playing = [
        asyncio.create_task(held.stream(stop, held_after=1)),
        *(asyncio.create_task(agent.stream(stop)) for agent in others[: STREAMING - 1]),
        *(asyncio.create_task(agent.play(stop)) for agent in others[STREAMING - 1 :]),
    ]
    try:
        async with asyncio.timeout(60):
            await held.seeing.wait()
        for _ in range(KILLS):
            await all_told(list(agents.values())[STREAMING:])
            assert await lives.next() == keys
        await all_told(list(agents.values())[STREAMING:])
        stop.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*playing)
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await lives.end()
        await asyncio.gather(*(agent.client.close() for agent in agents.values()))
    await check(tmp_path, keys, agents)


async def all_told(agents: list[Agent]) -> None:
    """Each of them is given another answer."""
    for agent in agents:
        agent.told.clear()
    async with asyncio.timeout(60):
        await asyncio.gather(*(agent.told.wait() for agent in agents))


def client(port: int, session: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=session_url(f"http://127.0.0.1:{port}", session), api_key=key, max_retries=12, timeout=30
    )


async def check(folder: Path, keys: dict[str, str], agents: dict[str, Agent]) -> None:
    """The log has exactly the answers that the agents received."""
    log = FileSessionLog(folder)
    sessions = Sessions(TOKEN, log=log)
    restored = {session.id: session for session in sessions.restore()}
    assert {name: session.key for name, session in restored.items()} == keys
    for name, agent in agents.items():
        session = restored[name]
        answers = {node.call: node for node in session.trees["policy"].nodes() if node.kind == "sampled"}
        assert agent.given or agent.cut
        if agent.cut:
            said = "".join(token for token, _ in agent.seen)
            whole = [node for node in answers.values() if node.messages[0].body["content"].startswith(said)]
            assert session.incomplete or whole, "what the agent saw is there, or the session says that it is not"
        else:
            assert not session.incomplete or name in list(keys)[:STREAMING]
        for call, tokens in agent.given.items():
            node = answers[call]
            shown = list(node.tokens)[: len(tokens)]
            assert [logprob for _, logprob in tokens] == pytest.approx([-token / 128 for token in shown])
            assert len(tokens) == len(node.tokens) - 1, "all but the end of the turn"
            assert "".join(token for token, _ in tokens) == node.messages[0].body["content"]
        assert trained(session) == sum(len(node.tokens) for node in answers.values())
    held = next(iter(agents))
    assert agents[held].cut
    assert "may have seen more" in restored[held].incomplete
    await log.close()


def trained(session: Session) -> int:
    return sum(sample.trained for sample in session.record().samples("policy"))
