"""A node on a real gateway and a real storage unit. Imitated: the dataflow service, and what samples the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai

from rillflow.clients.units import UnitWriter
from rillflow.config.policy import SamplingConfig
from rillflow.config.rollout import GatewayConfig, RolloutConfig
from rillflow.contracts import SystemClock, TokenSource
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.gateway import Gateway, Policy, Renderer
from rillflow.gateway.control import Control, Givers
from rillflow.gateway.feed import Feed
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.rollout.episode import Surroundings
from rillflow.rollout.episodes import Episodes
from rillflow.rollout.main import incarnation
from rillflow.rollout.node import Node
from rillflow.rollout.players import OutsidePlayer, Player, WorkflowPlayer
from rillflow.rollout.push import FailureSender, Pusher
from rillflow.rollout.rewards import LateRewards, RewardRules
from rillflow.types import (
    Ack,
    Chunk,
    CompleteTask,
    FailTask,
    GenerateRequest,
    Heartbeat,
    HeartbeatReply,
    LeaseTasks,
    Prompt,
    Task,
    TaskLease,
    TaskLeases,
    Units,
)
from tiny_policy import tiny_renderer

TOKEN = "t" * 32


def task(number: int = 0) -> Task:
    prompt = Prompt(id=f"p{number}", payload={"question": f"what is {number}?"})
    return Task(id=f"g.{number}", prompt=prompt, group="g", place=number, lane="train", seed=number)


class Dataflow:
    """Leases its tasks on request, and ends the run when the test says so."""

    def __init__(self, tasks: list[Task], unit: FileUnit | None = None, versions: Mapping[str, int] | None = None):
        self.tasks = tasks
        self.unit = unit
        self.heads = dict(versions or {"agent": 0})
        self.done: list[CompleteTask] = []
        self.failed: list[FailTask] = []
        self.asked: list[LeaseTasks] = []
        self.beats: list[Heartbeat] = []
        self.lost: list[str] = []
        self.over = asyncio.Event()
        self.told = asyncio.Event()  # of an end

    async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        self.asked.append(ask)
        given, self.tasks = self.tasks[: ask.want], self.tasks[ask.want :]
        if not given:
            with_time = asyncio.wait({asyncio.ensure_future(self.over.wait())}, timeout=0.05)
            _, waiting = await with_time
            for one in waiting:
                one.cancel()
        leases = [TaskLease(task=one, attempt=f"{one.id}-a", seconds=30) for one in given]
        return TaskLeases(leases=leases, heads=self.heads, phase="ended" if self.over.is_set() else "training")

    async def heartbeat(self, beat: Heartbeat, deadline: float) -> HeartbeatReply:
        self.beats.append(beat)
        lost = [attempt for attempt in beat.attempts if attempt in self.lost]
        return HeartbeatReply(lost=lost, heads=self.heads, phase="ended" if self.over.is_set() else "training")

    async def complete(self, news: CompleteTask, deadline: float) -> Ack:
        self.done.append(news)
        self.told.set()
        return Ack(accepted=True)

    async def fail(self, news: FailTask, deadline: float) -> Ack:
        self.failed.append(news)
        self.told.set()
        return Ack(accepted=True)

    async def units(self) -> Units:
        assert self.unit is not None
        return Units(units=[self.unit.info()])

    async def until(self, ends: int) -> None:
        """So many episodes have ended, well or badly."""
        async with asyncio.timeout(20):
            while len(self.done) + len(self.failed) < ends:
                self.told.clear()
                await self.told.wait()


class Says:
    """Answers every call with the same three tokens."""

    context = 512

    def __init__(self, renderer: Renderer) -> None:
        self._ids = renderer.encode("7 7 7")[:3]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0)
        numbers = [-0.5] * len(self._ids)
        yield Chunk(tokens=self._ids, logprobs=numbers, raw_logprobs=numbers, version=0, finish="stop")


class NoEngines:
    """The interface of a node's engines, without engines."""

    own = True

    def __init__(self, versions: Mapping[str, int] | None = None) -> None:
        self.manager: Any = SimpleNamespace(episode_finished=self._count)
        self.finished = 0
        self.serving: dict[str, int] | None = dict(versions or {"agent": 0})
        self.trouble = ""

    def _count(self) -> None:
        self.finished += 1

    def versions(self) -> dict[str, int] | None:
        return self.serving

    def behind(self, heads: Mapping[str, int]) -> list[str]:
        return []

    async def refresh(self, policy: str) -> None: ...

    async def newer(self, than: Mapping[str, int], seconds: float) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    async def run(self) -> None:
        await asyncio.Event().wait()


class World:
    """One node, `async with`: it runs until the block ends. The same folder again is the node that comes after."""

    def __init__(
        self,
        folder: Path,
        tasks: int | list[Task] = 1,
        *,
        workflow: Any = None,
        sources: Mapping[str, TokenSource] | None = None,
        player: Player | None = None,
        reward: Any = None,
        givers: Givers | None = None,
        rules: RewardRules | None = None,
        policies: tuple[str, ...] = ("agent",),
        clock: Any = None,
        limits: GatewayConfig | None = None,
        port: int = 0,
        surroundings: Surroundings | None = None,
        **rollout: Any,
    ) -> None:
        self.folder = folder
        self.clock = clock or SystemClock()
        self.feed = Feed()
        self.engines = NoEngines(dict.fromkeys(policies, 0))
        self.unit = FileUnit(folder / "unit-0")
        given = [task(n) for n in range(tasks)] if isinstance(tasks, int) else tasks
        self.dataflow: Any = Dataflow(given, self.unit, self.engines.serving)
        self._sources = sources
        self._player: Player = player or (WorkflowPlayer(workflow) if workflow else OutsidePlayer(self.feed))
        self._reward = reward
        self._givers: Givers = givers or ("run" if reward is None else "nobody")
        self._rules = rules
        self._policies = policies
        self._limits = limits
        self._surroundings = surroundings or Surroundings()
        self._rollout = RolloutConfig(**rollout)
        self._port = port
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        renderer = tiny_renderer()
        sources = self._sources or dict.fromkeys(self._policies, Says(renderer))
        log = FileSessionLog(self.folder / "sessions")
        self.gateway = Gateway(
            TOKEN,
            {name: Policy(sources[name], renderer) for name in self._policies},
            dict.fromkeys(self._policies, SamplingConfig()),
            limits=self._limits,
            clock=self.clock,
            log=log,
        )
        late = LateRewards(self.clock)
        Control(self.gateway, self.feed, late.given, self._givers)
        writer = UnitWriter(self.dataflow.units, TOKEN)
        client = openai.AsyncOpenAI(
            base_url="http://unset", api_key="unset", max_retries=0,
            http_client=openai.DefaultAioHttpClient(timeout=None),
        )  # fmt: skip
        self._stack.callback(self.unit.close)
        for close in (log.close, self.gateway.stop, client.close, writer.close):
            self._stack.push_async_callback(close)
        failures = FailureSender(self.clock)
        pusher = Pusher("n", self.dataflow, writer, errors=self._surroundings.errors, failures=failures)
        self.episodes = Episodes(
            self._rollout, self._policies, player=self._player, reward=self._reward, gateway=self.gateway,
            client=client, pusher=pusher, late=late,
            clock=self.clock, rules=self._rules, surroundings=self._surroundings,
        )  # fmt: skip
        going_on = self.episodes.going_on(self.gateway.sessions.restore())
        self.url = self.episodes.gateway_url = await self.gateway.start("127.0.0.1", self._port)
        engines: Any = self.engines
        self.incarnation = incarnation(self.folder, going_on)
        self.node = Node(
            "n", self.incarnation, self._rollout, dataflow=self.dataflow, engines=engines, episodes=self.episodes
        )
        self.feed.on_ask = self.node.wake
        self.running = asyncio.create_task(self.node.run(going_on))
        return self

    async def end(self) -> None:
        """The run has ended."""
        self.dataflow.over.set()
        self.node.wake()
        await asyncio.wait_for(self.running, 20)

    async def __aexit__(self, *error: object) -> None:
        """The node stops in the middle of whatever it does."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self._player.close()
        await self._stack.aclose()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Look until it is so."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited {seconds:.0f} s in vain")


async def call(base_url: str, api_key: str, text: str = "hello") -> Any:
    """One call of the OpenAI client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return await client.chat.completions.create(
            model="agent", messages=[{"role": "user", "content": text}], max_tokens=8
        )
