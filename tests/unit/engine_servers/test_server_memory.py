"""A paused server gives its memory back where it can, and has it again before it samples or is given weights."""

from __future__ import annotations

import asyncio

from fake_server import FakeServer
from test_server_engine import collect, expected, request, running, tokens

from counting_engine import until
from rillflow.engine.host import Frees
from rillflow.types import Chunk


async def test_it_sleeps_while_it_is_paused_and_no_token_is_lost() -> None:
    async with running() as engine:
        assert isinstance(engine, Frees)
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.free()
        assert "sleep" not in engine.log, "it samples"
        await engine.pause()
        await engine.free()
        await engine.free()
        engine.give(100)
        await engine.resume()
        await task
        assert tokens(chunks) == expected(request())
        assert engine.log == ["up", "cut", "sleep", "wake", "go on"]


async def test_weights_wake_it_though_it_stays_paused() -> None:
    async with running() as engine:
        await engine.pause()
        await engine.free()
        await engine.load({}, 1)
        assert engine.log == ["up", "sleep", "wake", "apply"]
        await engine.resume()
        assert engine.log[-1] == "apply", "it was awake"


async def test_a_server_that_cannot_sleep_goes_on_as_it_is() -> None:
    async with running() as engine:
        engine.sleeps = False
        await engine.pause()
        await engine.free()
        await engine.resume()
        assert engine.log == ["up", "sleep"]
        engine.sleeps = None  # it does not answer
        await engine.pause()
        await engine.free()
        await engine.resume()
        assert "wake" not in engine.log


async def test_a_server_that_does_not_wake_up_is_started_anew() -> None:
    engine: FakeServer
    async with running() as engine:
        engine.oversleeps = True
        await engine.pause()
        await engine.free()
        await engine.resume()
        await until(lambda: engine.log.count("up") == 2)
