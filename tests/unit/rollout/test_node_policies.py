"""A node with two policies: real engines, gateway and storage unit; only the dataflow service is imitated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from rillflow.agents.environments import stockroom
from rillflow.agents.workflows.stockroom_checked import play as checked
from rillflow.clients.units import UnitWriter
from rillflow.config import PolicyConfig
from rillflow.config.schema import RolloutConfig, SamplingConfig
from rillflow.contracts import Episode
from rillflow.dataflow.units import FileUnit
from rillflow.gateway import Gateway, Policy, Renderer
from rillflow.rollout.main import build_engine
from rillflow.rollout.node import Node
from rillflow.types import (
    Ack,
    CompleteTask,
    FailTask,
    HeartbeatReply,
    LeaseTasks,
    Prompt,
    Task,
    TaskLease,
    TaskLeases,
    Units,
)
from rillflow.weights.models import load_tokenizer

TOKEN = "t" * 32
POLICIES = ("solver", "checker")


class Dataflow:
    """Hands its tasks out once and says that the run has ended when all of them have."""

    def __init__(self, tasks: list[Task], unit: FileUnit) -> None:
        self._tasks = tasks
        self._left = len(tasks)
        self._unit = unit
        self._over = asyncio.Event()
        self.done: list[CompleteTask] = []
        self.failed: list[FailTask] = []

    async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        heads = dict.fromkeys(POLICIES, 0)
        assert ask.versions == heads
        if not self._tasks:
            await self._over.wait()
            return TaskLeases(leases=[], heads=heads, phase="ended")
        leases = [TaskLease(task=task, attempt=f"{task.id}-a", seconds=30) for task in self._tasks]
        self._tasks = []
        return TaskLeases(leases=leases, heads=heads, phase="training")

    async def heartbeat(self, beat: Any, deadline: float) -> HeartbeatReply:
        return HeartbeatReply(lost=[], heads={}, phase="training")

    async def complete(self, news: CompleteTask, deadline: float) -> Ack:
        self.done.append(news)
        return self._end()

    async def fail(self, news: FailTask, deadline: float) -> Ack:
        self.failed.append(news)
        return self._end()

    def _end(self) -> Ack:
        self._left -= 1
        if not self._left:
            self._over.set()
        return Ack(accepted=True)

    async def units(self) -> Units:
        return Units(units=[self._unit.info()])


class Idle:
    """Follows no weights."""

    loads, seconds = 0, 0.0

    async def refresh(self) -> bool:
        return False

    async def run(self, every: float) -> None:
        await asyncio.sleep(60)


@pytest.fixture
async def unit(tmp_path: Path) -> AsyncIterator[FileUnit]:
    unit = FileUnit(tmp_path / "unit-0")
    yield unit
    unit.close()


async def played(workflow: Any, unit: FileUnit, count: int) -> Dataflow:
    """The end of `count` episodes."""
    prompts = stockroom.prompts("train", count, 1)
    tasks = [
        Task(id=f"g.{n}", prompt=Prompt(**row), group="g", place=n, lane="train", seed=n)
        for n, row in enumerate(prompts)
    ]
    dataflow: Any = Dataflow(tasks, unit)
    policy = PolicyConfig.model_validate({"model": "tiny", "engine": {"slots": 8, "context": 160}})
    engines = {name: build_engine(policy, exact=False) for name in POLICIES}
    gateway = Gateway(
        TOKEN,
        {name: Policy(engine, Renderer.load("tiny")) for name, engine in engines.items()},
        dict.fromkeys(POLICIES, SamplingConfig()),
    )
    writer = UnitWriter(dataflow.units, TOKEN)
    client = openai.AsyncOpenAI(
        base_url="http://unset", api_key="unset", http_client=openai.DefaultAioHttpClient(timeout=None), max_retries=0
    )
    for engine in engines.values():
        await engine.start()
    url = await gateway.start("127.0.0.1")
    recipe: Any = SimpleNamespace(rollout=RolloutConfig(episodes=16))
    refreshers: Any = dict.fromkeys(POLICIES, Idle())
    try:
        node = Node(
            "n", recipe, dataflow=dataflow, writer=writer, gateway=gateway, gateway_url=url, engines=engines,
            refreshers=refreshers, workflow=workflow, reward=None, client=client,
        )  # fmt: skip
        await asyncio.wait_for(node.run(), 60)
    finally:
        for engine in engines.values():
            await engine.close()
        await gateway.stop()
        await client.close()
        await writer.close()
    ended: Dataflow = dataflow
    return ended


async def test_each_policy_has_samples_and_rewards_of_its_own(unit: FileUnit) -> None:
    """And the shipped policy does judge: its verdicts are words, mostly yes or no."""
    dataflow = await played(checked, unit, 16)
    assert not dataflow.failed
    tokenizer, verdicts = load_tokenizer("tiny"), []
    for done in dataflow.done:
        solver = [sample for sample in done.samples if sample.policy == "solver"]
        (checker,) = [sample for sample in done.samples if sample.policy == "checker"]
        assert solver
        assert {sample.reward for sample in solver} == {done.reward}
        (columns,) = unit.get([checker.row], ["tokens", "mask"])
        ids = memoryview(columns["tokens"]).cast("i").tolist()
        said = [token for token, trained in zip(ids, columns["mask"], strict=True) if trained]
        verdict = str(tokenizer.decode(said, skip_special_tokens=True)).strip()
        verdicts.append(verdict)
        assert checker.reward == float(verdict == ("yes" if done.reward else "no"))
    assert len(dataflow.done) == 16
    assert sum(verdict in ("yes", "no") for verdict in verdicts) >= 12
    assert len({done.reward for done in dataflow.done}) == 2


async def test_a_policy_without_a_reward_fails_the_episode(unit: FileUnit) -> None:
    async def forgetful(episode: Episode) -> dict[str, float]:
        await checked(episode)
        return {"solver": 1.0}

    dataflow = await played(forgetful, unit, 2)
    assert not dataflow.done
    assert [news.cause for news in dataflow.failed] == ["reward_error"] * 2
    assert "WorkflowError: the episode sampled from checker" in dataflow.failed[0].error


async def test_one_number_rewards_all_policies(unit: FileUnit) -> None:
    async def shared(episode: Episode) -> float:
        await checked(episode)
        return 0.5

    dataflow = await played(shared, unit, 2)
    assert {sample.reward for done in dataflow.done for sample in done.samples} == {0.5}


# ---------------------------------------------------------------- following the weights


class Slow(Idle):
    """A pull that takes longer than anybody waits."""

    async def refresh(self) -> bool:
        await asyncio.sleep(600)
        return True


class Fast(Idle):
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.pulls = 0

    async def refresh(self) -> bool:
        self.pulls += 1
        await asyncio.sleep(0)
        self._engine.version = 1
        return True


async def test_a_slow_policy_delays_no_other() -> None:
    """The next question is asked as soon as one policy is up to date."""
    asked: list[dict[str, int]] = []
    stats = SimpleNamespace(generated_tokens=0, prefilled_tokens=0, reused_tokens=0)
    engines: Any = {name: SimpleNamespace(version=0, stats=lambda: stats) for name in POLICIES}
    fast = Fast(engines["checker"])

    class Ahead:
        async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
            asked.append(ask.versions)
            ended = ask.versions["checker"] == 1
            return TaskLeases(leases=[], heads=dict.fromkeys(POLICIES, 1), phase="ended" if ended else "training")

        async def heartbeat(self, beat: Any, deadline: float) -> HeartbeatReply:
            return HeartbeatReply(lost=[], heads={}, phase="training")

    recipe: Any = SimpleNamespace(rollout=RolloutConfig())
    nothing: Any = None
    refreshers: Any = {"solver": Slow(), "checker": fast}
    dataflow: Any = Ahead()
    node = Node(
        "n", recipe, dataflow=dataflow, writer=nothing, gateway=nothing, gateway_url="", engines=engines,
        refreshers=refreshers, workflow=nothing, reward=None, client=nothing,
    )  # fmt: skip
    await asyncio.wait_for(node.run(), 30)
    assert asked == [{"solver": 0, "checker": 0}, {"solver": 0, "checker": 1}]
    assert fast.pulls == 1
