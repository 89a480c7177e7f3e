"""The dataflow service and its units are killed, cut off and slowed down under load: 0 lost, 0 trained twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from dataflow_load import GROUP, Load, make_loaded_run

from bench.traffic import Processes, Role
from forwarder import Forwarder, forwarder
from rillflow.clients.dataflow import DataflowClient
from rillflow.storage import read_json
from rillflow.types import Units
from rillflow.wire import Client
from soak import repetitions

pytestmark = [pytest.mark.chaos, pytest.mark.soak]
SECONDS = 900.0  # one usually takes less than a minute
KILLS, CUTS = repetitions((6, 6), (21, 20))


class Killer:
    """kill -9 of one process after the other, each started again at once; the load gets on between two kills."""

    def __init__(self, load: Load, tasks: int) -> None:
        self.killed: Counter[str] = Counter()
        self._load = load
        self._tasks = tasks
        self._random = random.Random(7)

    async def run(self) -> None:
        roles = self._load.processes.roles
        for number in range(KILLS):
            while len(self._load.acked) < number * self._tasks // KILLS:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            if number % len(roles) == 0:
                self._random.shuffle(roles)
            role = roles[number % len(roles)]
            while not serves(role):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._random.uniform(0.0, 0.2))
            role.kill()
            self.killed[role.name] += 1
            role.start()
        self._load.harmed.set()


def serves(role: Role) -> bool:
    """Return whether it has published its address since it was started."""
    path = role.folder.root / "endpoints" / f"{role.name}.json"
    assert role.process is not None
    return path.is_file() and read_json(path)["pid"] == role.process.pid


async def test_kills_lose_nothing_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    prompts = repetitions(120, 400)
    with Processes(make_loaded_run(tmp_path, prompts), 2) as processes:
        client = await processes.ready()
        load = Load(processes, client, client.units)
        killer = Killer(load, prompts * GROUP)
        trainers = await load.play(killer.run(), SECONDS)
        await client.close()
    assert killer.killed == dict.fromkeys(("dataflow", "unit-0", "unit-1"), KILLS // 3)
    load.check(trainers, prompts)


class Far:
    """The service and its units behind forwarders, which are the only way to reach them."""

    def __init__(self, stack: AsyncExitStack, near: DataflowClient, url: str, token: str) -> None:
        self.links: dict[str, Forwarder] = {}
        self._stack = stack
        self._near = near
        self._url = url
        self._token = token

    async def client(self) -> DataflowClient:
        link = await self._link("dataflow", self._url)
        return DataflowClient(Client(link.url, self._token, peer="dataflow"))

    async def units(self) -> Units:
        """As the service tells of them, but for their addresses."""
        told = await self._near.units()
        moved = [
            msgspec.structs.replace(unit, path="", url=(await self._link(unit.unit, unit.url)).url)
            for unit in told.units
        ]
        return msgspec.structs.replace(told, units=moved)

    async def _link(self, name: str, url: str) -> Forwarder:
        if name not in self.links:
            self.links[name] = await self._stack.enter_async_context(forwarder(url))
        return self.links[name]


async def cut_often(far: Far) -> None:
    """All connections of one of them at a time; now and then it cannot be reached for a while."""
    draw = random.Random(3)
    while True:
        await asyncio.sleep(draw.uniform(0.1, 0.5))
        link = draw.choice(sorted(far.links.values(), key=lambda link: link.url))
        link.cut(refuse=draw.random() < 0.3)
        await asyncio.sleep(draw.uniform(0.0, 0.6))
        link.mend()


async def slow_down(far: Far) -> None:
    """A far region's line to all of them, which also stands still for a second now and then."""
    draw = random.Random(4)
    while True:
        for link in far.links.values():
            link.delay, link.rate = 0.05, 100_000.0
            link.stall()
            await asyncio.sleep(draw.uniform(0.2, 1.0))
            link.mend()
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    ("harm", "prompts"), [(cut_often, repetitions(80, 200)), (slow_down, repetitions(20, 50))], ids=["cuts", "slow"]
)
async def test_a_bad_network_loses_nothing_and_nothing_is_trained_twice(
    tmp_path: Path, harm: object, prompts: int
) -> None:
    with Processes(make_loaded_run(tmp_path, prompts), 2) as processes:
        near = await processes.ready()
        async with AsyncExitStack() as stack:
            folder = processes.folder
            far = Far(stack, near, folder.endpoint("dataflow") or "", folder.token)
            client = await far.client()
            stack.push_async_callback(client.close)
            load = Load(processes, client, far.units, near=False)
            load.harmed.set()  # the network's faults are not counted
            trainers = await load.play(harm(far), SECONDS)  # type: ignore[operator]
        await near.close()
    assert len(far.links) == 3
    assert all(link.carried for link in far.links.values())
    if harm is cut_often:
        assert sum(link.cuts for link in far.links.values()) >= CUTS
    load.check(trainers, prompts)
