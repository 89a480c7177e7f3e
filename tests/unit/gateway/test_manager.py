"""The rollout manager: each trigger and each resumption, with a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from counting_engine import CountingEngine, expected, request, until
from rillflow.config import PolicyConfig
from rillflow.config.rollout import PauseConfig
from rillflow.engine.build import build_engine
from rillflow.engine.host import EngineHost
from rillflow.errors import BadRequest, EngineLost
from rillflow.gateway.engine_pool import EnginePool, Fleet
from rillflow.gateway.rollout_manager import LEASE, RENEW, RolloutManager, add_engine_routes
from rillflow.types import Chunk, EngineInfo, GenerateRequest, Sampling
from rillflow.wire import Service

TOKEN = "t" * 32


class HandClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class World:
    def __init__(self, pause: PauseConfig | None = None, engines: int = 2) -> None:
        self.clock = HandClock()
        self.engines = [CountingEngine(hand_out=True) for _ in range(engines)]
        self.hosts = [EngineHost(f"e{number}", {"p": engine}) for number, engine in enumerate(self.engines)]
        self.fleet = Fleet(self.hosts)
        self.pool = EnginePool("p", self.fleet, context=4096)
        self.manager = RolloutManager(self.fleet, name="node-0", pause=pause, clock=self.clock)

    @property
    def paused(self) -> list[str]:
        return [host.known.paused for host in self.hosts]

    async def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds
        await self.manager.tick()

    async def collect(self, chunks: list[Chunk], **asked: Any) -> None:
        async for chunk in self.pool.generate(request(**asked)):
            chunks.append(chunk)


@pytest.fixture
async def made() -> AsyncIterator[list[World]]:
    worlds: list[World] = []
    yield worlds
    for world in worlds:
        await world.fleet.close()


def make(made: list[World], pause: PauseConfig | None = None) -> World:
    made.append(World(pause))
    return made[-1]


HELD = "node-0: threshold"


async def test_enough_episodes_stop_sampling_until_newer_weights_come(made: list[World]) -> None:
    world = make(made, PauseConfig(episodes=3))
    for _ in range(2):
        world.manager.episode_finished()
    await world.manager.tick()
    assert world.paused == ["", ""]
    world.manager.episode_finished()
    await world.manager.tick()
    assert world.paused == [HELD, HELD]
    await world.engines[0].load({}, 1)
    await world.manager.tick()
    assert world.paused == ["", HELD], "each engine goes on with its own new weights"
    await world.engines[1].load({}, 1)
    await world.manager.tick()
    assert world.paused == ["", ""]
    for _ in range(3):
        world.manager.episode_finished()
    await world.manager.tick()
    assert world.paused == [HELD, HELD], "it counts anew with every version"


async def test_a_while_after_the_last_weights_sampling_stops(made: list[World]) -> None:
    world = make(made, PauseConfig(seconds=30))
    await world.pass_time(20)
    for engine in world.engines:
        await engine.load({}, 1)
    await world.pass_time(20)
    assert world.paused == ["", ""]
    await world.pass_time(31)
    assert world.paused == [HELD, HELD]


async def test_no_pause_is_longer_than_asked(made: list[World]) -> None:
    world = make(made, PauseConfig(episodes=1, at_most=60))
    world.manager.episode_finished()
    await world.manager.tick()
    await world.pass_time(59)
    assert world.paused == [HELD, HELD]
    await world.pass_time(2)
    assert world.paused == ["", ""]
    await world.pass_time(100)
    assert world.paused == ["", ""], "what was counted before the pause is not counted again"


async def test_calls_stay_open_through_a_pause(made: list[World]) -> None:
    world = make(made, PauseConfig(episodes=1))
    chunks: list[Chunk] = []
    task = asyncio.create_task(world.collect(chunks))
    for engine in world.engines:
        engine.give(5)
    await until(lambda: len(chunks) == 5)
    world.manager.episode_finished()
    await world.manager.tick()
    for engine in world.engines:
        engine.give(100)
    await asyncio.sleep(0.02)
    assert len(chunks) == 5
    for engine in world.engines:
        await engine.load({}, 2)
    await world.manager.tick()
    await asyncio.wait_for(task, 60)
    assert [chunk.tokens[0] for chunk in chunks] == expected(request())
    assert [chunk.version for chunk in chunks] == [0] * 5 + [2] * 15


async def test_a_hold_that_moves_sends_calls_to_another_engine(made: list[World]) -> None:
    world = make(made)
    chunks: list[Chunk] = []
    task = asyncio.create_task(world.collect(chunks))
    await until(lambda: sum(engine.open for engine in world.engines) == 1)
    place = next(number for number, engine in enumerate(world.engines) if engine.open)
    world.engines[place].give(5)
    await until(lambda: len(chunks) == 5)
    await world.manager.hold("training", [f"e{place}"], move=True)
    assert world.paused[place] == "node-0: training"
    world.engines[1 - place].give(100)
    await asyncio.wait_for(task, 60)
    assert [chunk.tokens[0] for chunk in chunks] == expected(request())
    assert [chunk.seam for chunk in chunks if chunk.seam] == ["preempted"]
    await world.manager.release("training", [f"e{place}"])
    assert world.paused == ["", ""]


async def test_reasons_add_up(made: list[World]) -> None:
    world = make(made)
    await world.manager.hold("maintenance", ["e0"])
    await world.manager.hold("weights", ["e0"])
    await world.manager.release("weights")
    assert world.paused == ["node-0: maintenance", ""]
    assert world.manager.state()["held"] == [
        {"engine": "e0", "reason": "maintenance", "move": False, "seconds_left": None}
    ]
    await world.manager.release("maintenance", ["e1"])
    assert world.paused[0], "it was resumed elsewhere only"
    await world.manager.release("maintenance")
    assert world.paused == ["", ""]


async def test_a_hold_ends_with_its_time(made: list[World]) -> None:
    world = make(made)
    await world.manager.hold("short", seconds=5)
    await world.pass_time(4)
    assert world.paused == ["node-0: short"] * 2
    await world.pass_time(2)
    assert world.paused == ["", ""]


async def test_engines_are_told_again_as_long_as_the_reason_holds(made: list[World]) -> None:
    world = make(made)
    await world.manager.hold("maintenance")
    fresh = EngineHost("e0", {"p": CountingEngine()})
    world.fleet.add(fresh)  # it was restarted and has no holds
    assert fresh.known.paused == ""
    await world.pass_time(RENEW)
    assert fresh.known.paused == "node-0: maintenance"
    assert RENEW * 2 < LEASE, "one renewal may be lost"


async def test_an_engine_that_cannot_be_told_does_not_stop_the_others(
    made: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*reason: Any, **options: Any) -> Any:
        raise EngineLost("gone")

    world = make(made)
    monkeypatch.setattr(world.hosts[0], "hold", gone)
    monkeypatch.setattr(world.hosts[0], "release", gone)
    await world.manager.hold("maintenance")
    assert world.paused == ["", "node-0: maintenance"]
    await world.manager.release("maintenance")
    assert world.paused == ["", ""]
    monkeypatch.undo()


async def test_what_nobody_knows_is_refused(made: list[World]) -> None:
    world = make(made)
    with pytest.raises(BadRequest, match="no engine is called 'e7'"):
        await world.manager.hold("maintenance", ["e7"])
    with pytest.raises(BadRequest, match="reason"):
        await world.manager.hold("")
    assert world.paused == ["", ""]


async def test_routes(made: list[World]) -> None:
    world = make(made)
    service = Service("gateway", TOKEN)
    add_engine_routes(service, world.manager)
    url = await service.start()
    async with aiohttp.ClientSession(url, headers={"authorization": f"Bearer {TOKEN}"}) as session:

        async def ask(path: str, body: Any) -> tuple[int, Any]:
            async with session.post(path, json=body) as response:
                return response.status, await response.json(content_type=None) if response.status == 200 else None

        status, state = await ask("/engines/hold", {"reason": "maintenance", "engines": ["e1"], "move": True})
        assert status == 200
        assert state["engines"]["e1"]["paused"] == "node-0: maintenance"
        for bad in ({}, {"reason": ""}, {"reason": "x", "engines": ["e9"]}, {"reason": "x", "seconds": 0}, {"a": 1}):
            assert (await ask("/engines/hold", bad))[0] == 400
        async with session.get("/engines") as response:
            assert (await response.json())["held"][0]["reason"] == "maintenance"
        status, state = await ask("/engines/release", {"reason": "maintenance"})
        assert (status, state["held"]) == (200, [])
    await service.stop()


async def test_real_engines_continue_a_preempted_answer_as_if_nothing_had_happened() -> None:
    policy = PolicyConfig(model="tiny")
    engines = [build_engine(policy, exact=False) for _ in range(2)]
    hosts = [EngineHost(f"e{number}", {"p": engine}) for number, engine in enumerate(engines)]
    for host in hosts:
        await host.start()
    fleet = Fleet(hosts)
    pool, manager = EnginePool("p", fleet, context=512), RolloutManager(fleet)
    asked = GenerateRequest(id="r", tokens=[5, 6, 7, 8], sampling=Sampling(max_tokens=300, seed=11))
    whole = [token async for chunk in engines[1].generate(asked) for token in chunk.tokens]
    chunks: list[Chunk] = []
    async for chunk in pool.generate(asked):
        chunks.append(chunk)
        if len(chunks) in (1, 2, 3):  # to the other engine and back and there again
            place = next(name for name, member in fleet.members.items() if member.calls)
            await manager.hold("training", [place], move=True)
            await manager.release("training", ["e1" if place == "e0" else "e0"])
    assert [token for chunk in chunks for token in chunk.tokens] == whole
    assert {chunk.seam for chunk in chunks} == {"", "preempted"}
    await fleet.close()


async def test_a_reason_that_is_renewed_as_it_goes_is_gone(made: list[World]) -> None:
    world = make(made)
    await world.manager.hold("maintenance")
    world.clock.time += RENEW
    resumed = asyncio.create_task(world.manager.release("maintenance"))
    renewed = asyncio.create_task(world.manager.tick())
    await asyncio.gather(resumed, renewed)
    assert world.paused == ["", ""]


async def test_a_hold_that_arrives_after_its_release_is_taken_back(
    made: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(made)
    plain, go = world.hosts[0].hold, asyncio.Event()

    async def late(reason: str, **how: Any) -> EngineInfo:
        await go.wait()
        return await plain(reason, **how)

    monkeypatch.setattr(world.hosts[0], "hold", late)
    interrupted = asyncio.create_task(world.manager.hold("maintenance"))
    await until(lambda: world.paused[1] != "")
    await world.manager.release("maintenance")
    go.set()
    await interrupted
    assert world.paused == ["", ""]


async def test_an_engine_that_refuses_to_be_told_does_not_end_the_manager(
    made: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(made)

    async def refuse(*_: Any, **__: Any) -> EngineInfo:
        raise BadRequest("this is no engine")

    monkeypatch.setattr(world.hosts[0], "hold", refuse)
    monkeypatch.setattr(world.hosts[0], "release", refuse)
    await world.manager.hold("maintenance")
    assert world.paused == ["", "node-0: maintenance"]
    await world.manager.release("maintenance")
    assert world.paused == ["", ""]
