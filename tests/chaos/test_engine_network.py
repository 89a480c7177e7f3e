"""The network between a gateway and its engines is cut, stalls or is slow in the middle of answers: each answer is one.

Real engine services behind forwarders; their tokens are known beforehand.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing

import pytest

from counting_engine import CountingEngine, expected, request, until
from forwarder import Forwarder, forwarder
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import EngineService, RemoteEngine
from rillflow.gateway.engine_pool import EnginePool, Fleet

pytestmark = pytest.mark.chaos
TOKEN = "t" * 32
CALLS, LENGTH = 20, 100
STALL = 2.0


class World:
    """Two engines that are reached through forwarders alone."""

    def __init__(self, engines: list[CountingEngine], links: list[Forwarder], fleet: Fleet) -> None:
        self.engines = engines
        self.links = links
        self.fleet = fleet
        self.pool = EnginePool("p", fleet, context=4096)
        self.seams: Counter[str] = Counter()
        self.sampled: Counter[str] = Counter()  # tokens by call

    async def answer(self, number: int) -> None:
        asked = request(f"r{number}", count=LENGTH, seed=number, group=f"g{number}")
        tokens: list[int] = []
        async with aclosing(self.pool.generate(asked)) as stream:
            async for chunk in stream:
                tokens += chunk.tokens
                self.sampled[asked.id] = len(tokens)
                self.seams[chunk.seam] += bool(chunk.seam)
        assert tokens == expected(asked)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines, links, remotes = [], [], []
        for number in range(2):
            engine = CountingEngine(hand_out=True, slots=CALLS)
            service = EngineService(EngineHost(f"e{number}", {"p": engine}), TOKEN, idle=0.05)
            link = await stack.enter_async_context(forwarder(await service.start()))
            stack.push_async_callback(service.stop)
            engines.append(engine)
            links.append(link)
            remotes.append(RemoteEngine(f"e{number}", link.url, TOKEN, stall=STALL, connect=STALL))
        fleet = Fleet(remotes)
        stack.push_async_callback(fleet.close)
        for remote in remotes:
            await remote.info()
        yield World(engines, links, fleet)


def cut(link: Forwarder) -> None:
    link.cut(refuse=True)


def stall(link: Forwarder) -> None:
    link.stall()


@pytest.mark.parametrize("harm", [cut, stall])
async def test_answers_go_on_at_the_other_engine_and_the_first_is_used_again(
    world: World, harm: Callable[[Forwarder], None]
) -> None:
    calls = asyncio.gather(*(world.answer(number) for number in range(CALLS)))
    for engine in world.engines:
        engine.give(5 * CALLS)
    await until(lambda: len(world.sampled) == CALLS and world.engines[0].open)
    harm(world.links[0])
    world.engines[1].give(2 * CALLS * LENGTH)
    await calls
    assert world.seams["engine_lost"] >= 1
    await until(lambda: len(world.fleet.ready("p")) == 1)
    world.links[0].mend()
    await until(lambda: len(world.fleet.ready("p")) == 2)


async def test_a_slow_network_is_no_loss(world: World) -> None:
    """Signs of life are enough, however late the tokens come."""
    for link, member in zip(world.links, world.fleet.members.values(), strict=True):
        link.delay = 0.1
        member.engine._stall = 10 * STALL  # type: ignore[attr-defined]
    for engine in world.engines:
        engine.give(2 * CALLS * LENGTH)
    await asyncio.gather(*(world.answer(number) for number in range(CALLS)))
    assert not world.seams.total()
