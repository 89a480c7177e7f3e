"""Engines under one roof: reasons to hold, answers that are sent away, versions that are waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counting_engine import CountingEngine, expected, request, until
from rillflow.engine import host as module
from rillflow.engine.host import EngineHost
from rillflow.errors import BadRequest, EngineLost
from rillflow.types import Chunk


async def collect(host: EngineHost, asked: Any, chunks: list[Chunk], floor: int = -1) -> None:
    async for chunk in host.generate("p", asked, floor):
        chunks.append(chunk)


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


async def test_it_samples_while_nobody_has_a_reason_against_it() -> None:
    engine = CountingEngine(hand_out=True)
    host = EngineHost("e", {"p": engine})
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(host, request(), chunks))
    engine.give(3)
    await until(lambda: len(chunks) == 3)
    await host.hold("one")
    await host.hold("other")
    engine.give(100)
    assert (await host.info()).paused == "one, other"
    await host.release("one")
    await host.release("unknown")
    await asyncio.sleep(0.01)
    assert len(chunks) == 3
    info = await host.release("other")
    assert info.paused == ""
    await task
    assert tokens(chunks) == expected(request())
    assert chunks[-1].finish == "length"


async def test_a_hold_that_nobody_renews_ends_by_itself() -> None:
    engine = CountingEngine()
    host = EngineHost("e", {"p": engine})
    await host.hold("short", seconds=0.02)
    await host.hold("renewed", seconds=0.02)
    await host.hold("renewed", seconds=60)
    await until(lambda: host.known.paused == "renewed")
    await host.release("renewed")
    chunks: list[Chunk] = []
    await collect(host, request(), chunks)
    assert tokens(chunks) == expected(request())


async def test_a_move_sends_running_answers_away_with_all_that_was_sampled() -> None:
    engine = CountingEngine(hand_out=True)
    host = EngineHost("e", {"p": engine})
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(host, request(), chunks))
    engine.give(4)
    await until(lambda: len(engine.logged) == 4)
    await host.hold("train", move=True)
    await task
    assert tokens(chunks) == [token for _, token in engine.logged] == expected(request())[:4]
    assert (chunks[-1].finish, chunks[-1].seam) == ("abort", "preempted")
    assert engine.open == 0, "the engine's own request is gone"
    late: list[Chunk] = []
    await collect(host, request("late"), late)
    assert [chunk.finish for chunk in late] == ["abort"]
    await host.release("train")
    engine.give(100)
    again: list[Chunk] = []
    await collect(host, request("again"), again)
    assert again[-1].finish == "length"


async def test_closing_sends_answers_away() -> None:
    engine = CountingEngine(hand_out=True)
    host = EngineHost("e", {"p": engine})
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(host, request(), chunks))
    await until(lambda: engine.open == 1)
    await host.close()
    await task
    assert (chunks[-1].finish, chunks[-1].seam) == ("abort", "moved")


async def test_a_request_waits_for_the_version_it_must_not_fall_behind() -> None:
    engine = CountingEngine(version=3)
    host = EngineHost("e", {"p": engine})
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(host, request(), chunks, floor=5))
    await asyncio.sleep(0.05)
    assert not chunks
    await engine.load({}, 5)
    await task
    assert {chunk.version for chunk in chunks} == {5}


async def test_it_waits_for_no_version_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CATCH_UP", 0.05)
    host = EngineHost("e", {"p": CountingEngine(version=3)})
    chunks: list[Chunk] = []
    await collect(host, request(), chunks, floor=9)
    assert {chunk.version for chunk in chunks} == {3}


async def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CountingEngine(hand_out=True)
    host = EngineHost("e", {"p": engine})
    frames = host.frames("p", request(), idle=0.01)
    assert [await anext(frames), await anext(frames)] == [None, None]
    engine.give(1)
    while (frame := await anext(frames)) is None:
        pass
    assert frame.tokens == expected(request())[:1]
    await frames.aclose()
    assert engine.open == 0


async def test_errors_of_engines_and_requests_pass() -> None:
    engine = CountingEngine(hand_out=True)
    host = EngineHost("e", {"p": engine})
    task = asyncio.create_task(collect(host, request(), []))
    await until(lambda: engine.open == 1)
    engine.break_down()
    with pytest.raises(EngineLost):
        await task
    with pytest.raises(BadRequest, match="no policy 'q'"):
        await anext(host.generate("q", request()))


async def test_real_engine_moves_lossless(kit: Any) -> None:
    """The embedded engine delivered all tokens that it drew before the cut, and the rest is drawn elsewhere alike."""
    model, other = kit.pair()
    asked = kit.request(kit.prompt(10), max_tokens=60, seed=5)
    async with kit.running(model) as engine, kit.running(other) as second:
        whole = await kit.ask(second, kit.prompt(10), max_tokens=60, seed=5)
        host = EngineHost("e", {"p": engine})
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(host, asked, chunks))
        await kit.until(lambda: engine.stats().generated_tokens > 12)
        await host.hold("train", move=True)
        await task
        assert len(tokens(chunks)) == engine.stats().generated_tokens < 60
        assert tokens(chunks) == whole.tokens[: len(tokens(chunks))]


async def test_a_hold_that_was_renewed_in_time_does_not_end_with_the_old_one() -> None:
    engine = CountingEngine()
    host = EngineHost("e", {"p": engine})
    await host.hold("tag", seconds=0.01)
    plain, go = engine.pause, asyncio.Event()

    async def slow() -> None:
        await go.wait()
        await plain()

    engine.pause = slow  # type: ignore[method-assign]
    other = asyncio.create_task(host.hold("other", seconds=60))
    await asyncio.sleep(0)
    renewed = asyncio.create_task(host.hold("tag", seconds=60))
    await asyncio.sleep(0.05)  # the first hold's time is over meanwhile
    go.set()
    await asyncio.gather(other, renewed)
    await host.release("other")
    await asyncio.sleep(0.01)
    assert host.known.paused == "tag"
    await host.release("tag")
