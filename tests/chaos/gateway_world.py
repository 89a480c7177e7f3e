"""A gateway in this process, real engine processes behind it, a publisher of weights, and agents that stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from commands import Warm
from forked_command import Program, fork_python
from rillflow.config.load import validate
from rillflow.contracts import TokenSource
from rillflow.gateway import Gateway, Policy, Renderer, session_url
from rillflow.gateway.node_engines import NodeEngines, node_engines
from rillflow.gateway.trees.record import SessionRecord
from rillflow.runtime.folder import RunFolder
from rillflow.types import Chunk, EngineInfo, Engines, GenerateRequest, LookEngines
from rillflow.types.routes import Updates
from rillflow.weights.models import load_policy_model
from rillflow.weights.store import FolderStore
from rillflow.weights.updates import EngineRoster
from rillflow.wire import Service

POLICY = "agent"


def make_folder(parent: Path, on_update: str) -> RunFolder:
    (parent / "prompts.jsonl").write_text('{"id": "0"}\n')
    engine = {"slots": 64, "context": 512, "on_update": on_update}
    recipe = validate(
        {
            "name": "gateway-chaos",
            # No trainer publishes here that could vouch for what the engines start with.
            "policies": {
                POLICY: {
                    "model": "tiny",
                    "engine": engine,
                    "sampling": {"temperature": 1.0},
                    "weights": {"probe": "off"},
                }
            },
            "workflow": "rillflow.examples.stockroom:play",
            "data": {"prompts": {"path": str(parent / "prompts.jsonl")}},
            "rollout": {"engines": 2, "refresh_every": 0.02},
        }
    )
    return RunFolder.create(recipe, parent)


class Roster(Service):
    """The part of the dataflow service that engines speak to."""

    def __init__(self, token: str) -> None:
        super().__init__("dataflow", token)
        self._engines = EngineRoster()
        self.on(Updates.engine_beat, self._beat)

    async def _beat(self, info: EngineInfo) -> Engines:
        return self._engines.hear(info)

    async def engines(self, ask: LookEngines) -> Engines:
        return self._engines.engines()


@dataclass
class EngineProcess:
    """One engine, which can be killed, frozen and started again."""

    folder: RunFolder
    name: str
    warm: Warm
    lives: int = 0
    process: Program | None = None

    def start(self) -> None:
        self.lives += 1
        script = Path(__file__).with_name("logged_engine.py")
        words = [str(script), str(self.folder.root), self.name, str(self.log(self.lives))]
        self.process = fork_python(self.warm.path(), words, os.environ, self.folder.log(self.name))

    def log(self, life: int) -> Path:
        return self.folder.root / f"{self.name}.{life}.tokens"

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait(10)

    def lines(self, life: int) -> Iterator[tuple[str, int, int, list[int]]]:
        """Request, place of the first token, version, tokens; a line that was cut by the kill is left out."""
        written = self.log(life).read_bytes() if self.log(life).exists() else b""
        for line in written.splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield tuple(json.loads(line))


class Publisher(threading.Thread):
    """A new version of the weights every `every` seconds, each a little different from the one before."""

    def __init__(self, folder: Path, every: float) -> None:
        super().__init__(name="publisher", daemon=True)
        self.store = FolderStore(folder)
        self.version = 0
        self.failure: Exception | None = None
        self._every = every
        self._over = threading.Event()
        model = load_policy_model("tiny", "fp32", torch.device("cpu"))
        self._tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.store.publish(self._tensors, 0, None)

    def run(self) -> None:
        name = next(name for name in self._tensors if name.endswith("norm.weight"))
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._every, time.monotonic())
            self._tensors[name] = self._tensors[name] * 1.0001
            try:
                self.store.publish(self._tensors, self.version + 1, self.version)
                self.version += 1
                self.store.prune(keep=20)
            except Exception as error:
                self.failure = error
                return

    def stop(self) -> None:
        self._over.set()
        self.join(10)


class Watched:
    """A pool whose seams are counted; `begun` are the requests that have some of their tokens."""

    def __init__(self, source: TokenSource) -> None:
        self.seams: Counter[str] = Counter()
        self.begun: set[str] = set()
        self._source = source

    @property
    def context(self) -> int:
        return self._source.context

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        try:
            async for chunk in self._source.generate(request):
                self.seams[chunk.seam] += bool(chunk.seam)
                self.begun.add(request.id)
                yield chunk
        finally:
            self.begun.discard(request.id)


@dataclass
class World:
    folder: RunFolder
    engines: list[EngineProcess]
    node: NodeEngines
    gateway: Gateway
    url: str
    pool: Watched
    renderer: Renderer
    publisher: Publisher
    said: dict[str, list[str]] = field(default_factory=dict)

    def begun_on(self, engine: int) -> int:
        """How many answers the engine is in the middle of, as far as this gateway has heard."""
        process = self.engines[engine]
        return len(self.pool.begun.intersection(request for request, *_ in process.lines(process.lives)))

    def record(self, session: str) -> SessionRecord:
        return self.gateway.sessions.close(session)

    async def play(self, http: aiohttp.ClientSession, session: str, turns: int, tokens: int, deadline: float) -> None:
        """One agent: streamed answers, each the history of the next."""
        number = int(session.removeprefix("s"))
        key = self.gateway.sessions.open(session, seed=number, group=session, deadline_seconds=deadline)
        history: list[dict[str, str]] = [{"role": "user", "content": f"What is in room {number}?"}]
        answers = self.said.setdefault(session, [])
        for turn in range(turns):
            # A temperature so high that answers are long: at 1 the policy stops early.
            body = {"model": POLICY, "messages": history, "stream": True, "max_tokens": tokens, "temperature": 2.0}
            answers.append(await stream(http, f"{session_url(self.url, session)}/chat/completions", key, body))
            history += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"And {turn}?"}]


async def stream(http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer, which must end as the provider says that it ends."""
    text, finish, ended = "", None, False
    async with http.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue  # a comment that keeps the connection open, or the end of an event
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                ended = True
            else:
                event = json.loads(data)
                assert "error" not in event, event
                choice = event["choices"][0]
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    assert ended
    assert finish in ("stop", "length")
    return text


@contextmanager
def started(engines: list[EngineProcess]) -> Iterator[None]:
    try:
        for engine in engines:
            engine.start()
        yield
    finally:
        for engine in engines:
            engine.kill()


@asynccontextmanager
async def world(parent: Path, warm: Warm, *, every: float, on_update: str = "keep") -> AsyncIterator[World]:
    folder = make_folder(parent, on_update)
    roster = Roster(folder.token)
    folder.publish_endpoint("dataflow", await roster.start())
    publisher = Publisher(folder.weights(POLICY), every)
    engines = [EngineProcess(folder, f"engine-{number}", warm) for number in range(2)]
    node = node_engines(
        folder.recipe, name="rollout-0", token=folder.token, weights=folder.root / "weights", roster=roster.engines
    )
    pool, renderer = Watched(node.pools[POLICY]), Renderer.load("tiny")
    gateway = Gateway(folder.token, {POLICY: Policy(pool, renderer)}, {POLICY: folder.recipe.policies[POLICY].sampling})
    with started(engines):
        url = await gateway.start()
        following = asyncio.create_task(node.run())
        try:
            async with asyncio.timeout(120):
                while len(node.fleet.ready(POLICY)) < 2:  # noqa: ASYNC110 - other processes send no event
                    await asyncio.sleep(0.05)
            yield World(folder, engines, node, gateway, url, pool, renderer, publisher)
        finally:
            publisher.stop() if publisher.is_alive() else None
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await gateway.stop()
            await node.close()
            await roster.stop()
