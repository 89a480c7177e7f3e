"""The engines of a node and the choice of one for a call: affinity, load, the roster, losses and versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from counting_engine import CountingEngine, request, until
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import EngineService, RemoteEngine
from rillflow.gateway.engine_pool import PROBE_EVERY, EnginePool, Fleet
from rillflow.types import Chunk, EngineInfo

TOKEN = "t" * 32


def info(name: str, url: str = "http://127.0.0.1:1", version: int = 0, **known: Any) -> EngineInfo:
    return EngineInfo(name=name, url=url, versions={"p": version}, context=100, slots=known.pop("slots", 4), **known)


def open_engine(one: EngineInfo) -> RemoteEngine:
    engine = RemoteEngine(one.name, one.url, TOKEN, stall=20, connect=20)
    engine.hear(one)
    return engine


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.close()


def picks(fleet: Fleet, groups: int = 300, floor: int = -1) -> dict[str, str]:
    found = {}
    for group in map(str, range(groups)):
        member = fleet.pick("p", group, floor)
        assert member is not None
        found[group] = member.engine.name
    return found


async def test_groups_have_favourites_and_only_those_of_a_lost_engine_move(fleet: Fleet) -> None:
    fleet.follow([info(f"e{n}") for n in range(4)], open_engine)
    before = picks(fleet)
    assert min(Counter(before.values()).values()) > 40
    assert picks(fleet) == before
    fleet.members["e2"].up = False
    after = picks(fleet)
    assert all(after[group] == engine for group, engine in before.items() if engine != "e2")
    assert {after[group] for group, engine in before.items() if engine == "e2"} == {"e0", "e1", "e3"}


async def test_a_favourite_that_falls_behind_in_work_is_left(fleet: Fleet) -> None:
    fleet.follow([info("a"), info("b", slots=8)], open_engine)
    group = next(group for group, engine in picks(fleet).items() if engine == "a")
    fleet.members["a"].calls = 4
    assert fleet.pick("p", group, -1) is fleet.members["a"], "as long as it has slots"
    fleet.members["a"].calls = 7
    assert fleet.pick("p", group, -1) is fleet.members["b"]
    fleet.follow([info("a"), info("b", slots=8, running=8, waiting=4)], open_engine)
    assert fleet.pick("p", group, -1) is fleet.members["a"], "the other one has as much to do, for others"


async def test_an_engine_of_the_version_asked_for_comes_first(fleet: Fleet) -> None:
    fleet.follow([info("a", version=3), info("b", version=5)], open_engine)
    assert set(picks(fleet, floor=4).values()) == {"b"}
    assert set(picks(fleet, floor=9).values()) == {"a", "b"}
    assert fleet.versions(["p"]) == {"p": 3}
    assert fleet.versions(["p", "q"]) is None
    assert fleet.pick("q", "g", -1) is None


async def test_held_and_lost_engines_get_nothing(fleet: Fleet) -> None:
    fleet.follow([info("a", paused="tag"), info("b", version=7)], open_engine)
    assert set(picks(fleet).values()) == {"b"}
    assert fleet.versions(["p"]) == {"p": 7}, "what is held for long does not hold back the node"
    fleet.members["b"].up = False
    assert fleet.pick("p", "g", -1) is None
    assert fleet.why_not("p") == "a is held (tag); b does not answer"
    assert fleet.versions(["p"]) == {"p": 0}
    fleet.members["a"].up = False
    assert fleet.versions(["p"]) is None


async def test_the_roster_brings_moves_and_removes_engines(fleet: Fleet) -> None:
    fleet.follow([info("a", "http://127.0.0.1:1"), info("b")], open_engine)
    first = fleet.members["a"]
    fleet.follow([info("a", "http://127.0.0.1:1", version=2)], open_engine)
    assert fleet.members["a"] is first
    assert first.engine.known.versions == {"p": 2}
    assert "b" in fleet.members, "a roster that was started anew has not heard of everybody yet"
    fleet.follow([info("a", "http://127.0.0.1:2")], open_engine)
    assert fleet.members["a"] is not first
    fleet.members["b"].up = False
    fleet.follow([info("a", "http://127.0.0.1:2")], open_engine)
    assert set(fleet.members) == {"a"}


async def test_a_lost_engine_is_probed_until_it_answers(fleet: Fleet) -> None:
    engine = CountingEngine()
    service = EngineService(EngineHost("e", {"p": engine}), TOKEN)
    url = await service.start()
    port = int(url.rsplit(":", 1)[1])
    fleet.add(open_engine(info("e", url)))
    pool = EnginePool("p", fleet, context=100)
    await service.stop()
    chunks: list[Chunk] = []

    async def call() -> None:
        async for chunk in pool.generate(request()):
            chunks.append(chunk)

    task = asyncio.create_task(call())
    await until(lambda: bool(pool.waiting()))
    assert "e does not answer" in pool.waiting()[0]
    again = EngineService(EngineHost("e", {"p": CountingEngine(version=3)}), TOKEN)
    await again.start(port=port)
    await asyncio.wait_for(task, 20)
    assert {chunk.version for chunk in chunks} == {3}
    await again.stop()


async def test_versions_of_a_group_do_not_go_back_when_it_changes_engines() -> None:
    ahead, behind = CountingEngine(version=6, hand_out=True), CountingEngine(version=4)
    fleet = Fleet([EngineHost("ahead", {"p": ahead}), EngineHost("behind", {"p": behind})])
    pool = EnginePool("p", fleet, context=100)
    group = next(g for g in map(str, range(100)) if fleet.pick("p", g, 5) is fleet.members["ahead"])
    versions: list[int] = []

    async def call() -> None:
        async for chunk in pool.generate(request(group=group)):
            versions.append(chunk.version)

    await fleet.members["behind"].engine.hold("not yet")
    task = asyncio.create_task(call())
    ahead.give(5)
    await until(lambda: len(versions) == 5)
    await fleet.members["behind"].engine.release("not yet")
    await fleet.members["ahead"].engine.hold("train", move=True)
    await until(lambda: fleet.members["behind"].calls == 1)
    await asyncio.sleep(0.05)
    assert not behind.requests, "it waits for the version that the answer has already"
    await behind.load({}, 8)
    await asyncio.wait_for(task, 20)
    assert versions == [6] * 5 + [8] * 15
    versions.clear()
    await behind.load({}, 2)  # the line of weights went back: after a while the answer goes on
    await asyncio.wait_for(call(), 20)
    assert set(versions) == {2}
    assert pool._floors[group] == 2
    await fleet.close()


@pytest.mark.parametrize("turns", range(4))
async def test_a_wait_for_news_that_is_cut_as_they_come_is_cut(turns: int) -> None:
    fleet = Fleet()
    task = asyncio.create_task(fleet.changed(60))
    for _ in range(3):
        await asyncio.sleep(0)
    fleet.notify()
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.cancel():  # it had not ended yet
        await asyncio.wait([task])
        assert task.cancelled()


async def test_a_stranger_at_an_engines_address_is_a_lost_engine(fleet: Fleet) -> None:
    """Its port may be another run's by now."""
    stranger = EngineService(EngineHost("e", {"p": CountingEngine()}), "s" * 32)
    url = await stranger.start()
    fleet.follow([info("strange", url), info("gone")], open_engine)
    fleet.add(EngineHost("own", {"p": CountingEngine()}))
    pool = EnginePool("p", fleet, context=100)
    group = next(g for g in map(str, range(100)) if fleet.pick("p", g, -1) is fleet.members["strange"])
    chunks = [chunk async for chunk in pool.generate(request(group=group))]
    assert chunks[-1].finish == "length"
    assert not fleet.members["strange"].up
    await asyncio.sleep(2 * PROBE_EVERY)
    assert fleet._reviving is not None
    assert not fleet._reviving.done(), "others are still asked"
    await stranger.stop()


async def test_an_engine_that_the_roster_forgot_is_asked_whether_it_lives(fleet: Fleet) -> None:
    """Without calls its loss goes unnoticed, and its last known version would hold back the node."""
    service = EngineService(EngineHost("new", {"p": CountingEngine(version=7)}), TOKEN)
    new = info("new", await service.start(), version=7)
    fleet.follow([new, info("old", version=3)], open_engine)
    assert fleet.versions(["p"]) == {"p": 3}
    fleet.follow([new], open_engine)
    await until(lambda: not fleet.members["old"].up)
    assert fleet.versions(["p"]) == {"p": 7}
    fleet.follow([], open_engine)
    assert set(fleet.members) == {"new"}
    for _ in range(3):
        await asyncio.sleep(PROBE_EVERY)
        assert fleet.members["new"].up, "it lives, whatever the roster says"
    await service.stop()
