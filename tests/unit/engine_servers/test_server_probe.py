"""A server's weights are sampled from once they have reproduced their probe; also those of a server that came back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_server import FakeServer
from test_server_engine import collect, request, running, tokens

from counting_engine import until
from rillflow.contracts import UNKNOWN, Patch
from rillflow.engine.servers import base as module
from rillflow.errors import EngineError
from rillflow.types import Chunk, Probe
from rillflow.weights.probe import FP32, ProbeMismatch

GOOD = Probe(prompts=[[1, 2, 3]] * 2, logprobs=[[-1.0, -1.0]] * 2, tolerance=FP32)


async def waits(engine: FakeServer) -> asyncio.Task[list[Chunk]]:
    """A request that nothing is sampled for, though the server could."""
    engine.give(100)
    asked = asyncio.create_task(collect(engine, request(), []))
    await asyncio.sleep(0.01)
    assert not engine.asked
    return asked


async def test_weights_are_proven_before_answers_go_on() -> None:
    async with running() as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.load({}, 1, GOOD)
        engine.give(100)
        await task
        # The server goes on for the probe, our own answers only afterwards.
        assert engine.log == ["up", "cut", "apply", "go on", "score"]
        assert [version for version, _ in engine.asked] == [0, 1]


@pytest.mark.parametrize("way", ["load", "patch"])
async def test_weights_that_do_not_reproduce_their_probe_are_not_served(way: str) -> None:
    async with running() as engine:
        engine.logprob = -3.0
        given: Any = {} if way == "load" else Patch(0, {}, {})
        with pytest.raises(ProbeMismatch, match="version 1 is not served, wrong weights"):
            await getattr(engine, way)(given, 1, GOOD)
        assert (engine.version, engine.proven) == (UNKNOWN, False)
        asked = await waits(engine)
        engine.logprob = -1.0
        await engine.load({}, 1, GOOD)
        assert {chunk.version for chunk in await asked} == {1}


async def test_a_server_in_doubt_serves_nothing_before_its_first_proof() -> None:
    async with running() as engine:
        engine.doubt()
        asked = await waits(engine)
        await engine.prove(GOOD)
        assert {chunk.version for chunk in await asked} == {0}
        assert engine.stats().loads == 0


async def test_a_server_that_cannot_score_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(prompts: Any, version: int) -> list[list[float]]:
        raise EngineError("no log-probs")

    async with running() as engine:
        monkeypatch.setattr(engine, "scores", refuse)
        with pytest.raises(EngineError):
            await engine.load({}, 1, GOOD)
        assert (engine.version, engine.proven) == (UNKNOWN, False)


async def test_a_server_that_comes_back_is_in_doubt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that serves version 0, and however long it takes: it has restarted with files from a disk."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(module, "_WEIGHTS_SECONDS", 0.001)
    async with running() as engine:
        engine.doubt()
        await engine.prove(GOOD)
        engine.die()
        await until(lambda: engine.log.count("up") == 2 and "down" not in engine._calls.held)
        assert (engine.version, engine.proven) == (0, False)
        asked = await waits(engine)
        await engine.prove(GOOD)
        assert {chunk.version for chunk in await asked} == {0}


async def test_the_update_is_proven_while_the_node_is_paused() -> None:
    """A proof needs the server, and lets no answer go on."""
    async with running() as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.pause()
        await engine.load({}, 1, GOOD)
        engine.give(100)
        await asyncio.sleep(0.01)
        assert len(tokens(chunks)) == 7
        await engine.resume()
        await task
        assert len(tokens(chunks)) == 20
