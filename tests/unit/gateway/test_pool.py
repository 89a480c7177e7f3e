"""One unbroken answer, whatever happens to the engines: known tokens, each once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from counting_engine import CountingEngine, expected, request, until
from rillflow.engine.host import EngineHost
from rillflow.errors import ContextOverflow, EngineLost, QueueFull, Unavailable
from rillflow.gateway import engine_pool as module
from rillflow.gateway.engine_pool import EnginePool, Fleet
from rillflow.types import Chunk, EngineInfo, GenerateRequest, Sampling


class Call:
    """A call at work: its chunks so far."""

    def __init__(self, pool: EnginePool, asked: GenerateRequest) -> None:
        self.asked = asked
        self.chunks: list[Chunk] = []
        self.task = asyncio.create_task(self._run(pool))

    async def _run(self, pool: EnginePool) -> None:
        async with aclosing(pool.generate(self.asked)) as stream:
            async for chunk in stream:
                self.chunks.append(chunk)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def seams(self) -> list[str]:
        return [chunk.seam for chunk in self.chunks if chunk.seam]

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 20)
        assert self.tokens == expected(self.asked)
        assert [chunk.finish for chunk in self.chunks if chunk.finish] == ["length"]


class World:
    """Engines of this process, each a host of its own."""

    def __init__(self, *engines: CountingEngine) -> None:
        self.engines = engines
        self.hosts = [EngineHost(f"e{number}", {"p": engine}) for number, engine in enumerate(engines)]
        self.fleet = Fleet(self.hosts)
        self.pool = EnginePool("p", self.fleet, context=4096)

    def call(self, **asked: Any) -> Call:
        return Call(self.pool, request(**asked))

    def favourite(self, group: str) -> int:
        member = self.fleet.pick("p", group, -1)
        assert member is not None
        return int(member.engine.name[1:])

    def group_of(self, number: int) -> str:
        """A group whose favourite is that engine."""
        return next(group for group in map(str, range(1000)) if self.favourite(group) == number)


@pytest.fixture
async def two() -> AsyncIterator[World]:
    world = World(CountingEngine(hand_out=True), CountingEngine(hand_out=True))
    yield world
    await world.fleet.close()


async def test_an_answer_of_one_engine_is_passed_on(two: World) -> None:
    call = two.call(group=two.group_of(0))
    two.engines[0].give(20)
    await call.ended()
    assert call.seams == []
    assert len(two.engines[0].requests) == 1
    assert not two.engines[1].requests


async def test_a_lost_engine_is_a_seam_and_nothing_else(two: World) -> None:
    first, second = two.engines
    call = two.call(group=two.group_of(0))
    first.give(7)
    await until(lambda: len(call.tokens) == 7)
    second.give(100)
    first.break_down()
    await call.ended()
    assert call.seams == ["engine_lost"]
    assert call.chunks[7].seam == "engine_lost"
    (again,) = second.requests
    assert again.tokens == [*call.asked.tokens, *call.tokens[:7]]
    assert again.sampling.max_tokens == 13
    assert again.sampling.seed == call.asked.sampling.seed


async def test_a_loss_before_the_first_token_is_no_seam(two: World) -> None:
    first, second = two.engines
    call = two.call(group=two.group_of(0))
    await until(lambda: first.open == 1)
    second.give(100)
    first.break_down()
    await call.ended()
    assert call.seams == []


async def test_a_preempted_engine_sends_its_calls_on(two: World) -> None:
    first, second = two.engines
    calls = [two.call(name=f"r{n}", group=two.group_of(0), seed=n) for n in range(3)]
    first.give(10)
    await until(lambda: sum(len(call.tokens) for call in calls) == 10)
    second.give(100)
    await two.hosts[0].hold("train", move=True)
    for call in calls:
        await call.ended()
        assert call.seams == (["preempted"] if len(call.chunks) > 1 else [])
    assert len(first.requests) + len(second.requests) == 6
    late = two.call(name="late", group=two.group_of(1))
    await late.ended()
    assert len(second.requests) == 4


async def test_a_held_engine_keeps_its_calls(two: World) -> None:
    first, second = two.engines
    call = two.call(group=two.group_of(0))
    first.give(4)
    await until(lambda: len(call.tokens) == 4)
    await two.hosts[0].hold("threshold")
    first.give(100)
    second.give(100)
    other = two.call(name="other", group=call.asked.group)
    await other.ended()
    assert len(second.requests) == 1, "a new call goes where it can be sampled"
    assert len(call.tokens) == 4
    await two.hosts[0].release("threshold")
    await call.ended()
    assert call.seams == []


async def test_without_an_engine_a_call_waits_and_says_so(two: World) -> None:
    for host in two.hosts:
        await host.hold("tag", move=True)
    call = two.call()
    await until(lambda: bool(two.pool.waiting()))
    (why,) = two.pool.waiting()
    assert why == "1 calls of p wait for an engine: e0 is held (tag); e1 is held (tag)"
    for engine in two.engines:
        engine.give(100)
    await two.hosts[1].release("tag")
    two.fleet.notify()
    await call.ended()
    assert two.pool.waiting() == []
    assert not two.engines[0].requests


async def test_an_engine_that_comes_later_is_used() -> None:
    fleet = Fleet()
    pool = EnginePool("p", fleet, context=4096)
    call = Call(pool, request())
    await until(lambda: bool(pool.waiting()))
    assert "no engine has registered" in pool.waiting()[0]
    fleet.add(EngineHost("late", {"p": CountingEngine()}))
    await call.ended()
    await fleet.close()


async def test_many_losses_in_one_answer(two: World) -> None:
    """Each engine breaks again and again: as long as it gets on, the answer goes on."""
    call = two.call(count=60)

    async def break_often() -> None:
        while len(call.tokens) < 60:
            await until(lambda: any(engine.open for engine in two.engines))
            busy = next(engine for engine in two.engines if engine.open)
            enough = min(60, len(call.tokens) + 4)
            busy.give(enough - len(call.tokens))
            await until(lambda enough=enough: len(call.tokens) == enough)
            busy.break_down()
            await until(lambda busy=busy: not busy.open)

    await asyncio.wait_for(break_often(), 20)
    await call.ended()
    assert call.seams == ["engine_lost"] * 14


async def test_without_progress_it_gives_up(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
    for engine in two.engines:
        engine.break_down()
        monkeypatch.setattr(engine, "generate", lost)
    call = two.call()
    with pytest.raises(Unavailable, match="tried 8 times: broken for good"):
        await asyncio.wait_for(call.task, 20)


async def lost(asked: GenerateRequest) -> AsyncIterator[Chunk]:
    from rillflow.errors import EngineLost

    raise EngineLost("broken for good")
    yield


async def test_errors_of_the_request_itself_pass(two: World) -> None:
    for engine in two.engines:
        engine.context = 3
    with pytest.raises(ContextOverflow):
        await two.call().task


async def test_a_full_engine_is_passed_over_and_all_full_is_said() -> None:
    full = [CountingEngine(slots=1, queue=0, hand_out=True) for _ in range(2)]
    world = World(*full)
    group = world.group_of(0)
    first, second = world.call(group=group), world.call(name="second", group=group, seed=4)
    await until(lambda: [engine.open for engine in full] == [1, 1])
    with pytest.raises(QueueFull):
        await world.call(name="third", group=group).task
    # A call that has begun is never refused: it waits for its turn.
    full[0].give(5)
    await until(lambda: len(first.tokens) == 5)
    full[0].break_down()
    full[1].give(20)
    await second.ended()
    full[0].give(100)
    full[1].give(100)
    await first.ended()
    assert first.seams == ["engine_lost"]
    await world.fleet.close()


@pytest.mark.parametrize(("stop", "finish"), [(True, "stop"), (False, "length")])
async def test_a_cut_right_after_the_last_token(stop: bool, finish: str) -> None:
    """The engine was lost between its last token and the news that it was the last."""

    class Forgetful(CountingEngine):
        def _one(self, asked: GenerateRequest, index: int) -> Chunk:
            chunk = super()._one(asked, index)
            if chunk.finish is not None:
                self.break_down()
            return Chunk(tokens=chunk.tokens, logprobs=[-1.0], raw_logprobs=[-1.0], version=4)

    asked = request()
    if stop:
        sampling = Sampling(max_tokens=20, seed=3, stop_tokens=(expected(asked)[9],))
        asked = GenerateRequest(id="r", tokens=asked.tokens, sampling=sampling)
    world = World(Forgetful(hand_out=True))
    world.engines[0].give(10 if stop else 20)
    call = Call(world.pool, asked)
    await asyncio.wait_for(call.task, 60)
    assert call.tokens == expected(asked)[: 10 if stop else 20]
    assert (call.chunks[-1].finish, call.chunks[-1].version) == (finish, 4)
    assert len(world.engines[0].requests) == 1
    await world.fleet.close()


async def test_a_context_that_is_full_after_a_cut_is_an_end(two: World) -> None:
    first, second = two.engines
    call = two.call(group=two.group_of(0))
    first.give(6)
    await until(lambda: len(call.tokens) == 6)
    second.context = 8
    first.break_down()
    await asyncio.wait_for(call.task, 60)
    assert len(call.tokens) == 6
    assert call.chunks[-1].finish == "length"


async def test_a_draw_without_a_seed_stays_one_draw(two: World) -> None:
    first, second = two.engines
    call = two.call(seed=None, group=two.group_of(0))
    first.give(6)
    await until(lambda: len(call.tokens) == 6)
    second.give(100)
    first.break_down()
    await asyncio.wait_for(call.task, 60)
    seeds = {asked.sampling.seed for engine in two.engines for asked in engine.requests}
    assert len(seeds) == 1
    assert None not in seeds


async def test_closing_aborts(two: World) -> None:
    stream = two.pool.generate(request(group=two.group_of(0)))
    two.engines[0].give(1)
    await anext(stream)
    await stream.aclose()
    assert two.engines[0].open == 0
    assert all(member.calls == 0 for member in two.fleet.members.values())


class Fickle:
    """An engine that does with each call what comes next in its plan, and serves it at the end."""

    def __init__(self, plan: list[str]) -> None:
        self.plan = plan
        self.host = EngineHost("fickle", {"p": CountingEngine()})
        self.name, self.info, self.close = self.host.name, self.host.info, self.host.close
        self.hold, self.release = self.host.hold, self.host.release

    @property
    def known(self) -> EngineInfo:
        return self.host.known

    async def generate(self, policy: str, asked: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        what = self.plan.pop(0) if self.plan else ""
        if what == "lost":
            raise EngineLost("lost")
        if what == "away":
            yield Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=0, finish="abort", seam="preempted")
            return
        async for chunk in self.host.generate(policy, asked, floor):
            yield chunk


async def test_calls_that_were_sent_away_often_have_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr("rillflow.gateway.engine_pool.PROBE_EVERY", 0.001)
    fleet = Fleet([Fickle(["away"] * 10 + ["lost", "away", "lost"])])
    call = Call(EnginePool("p", fleet, context=4096), request())
    await call.ended()
    await fleet.close()
