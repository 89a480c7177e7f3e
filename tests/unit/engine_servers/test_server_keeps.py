"""Server engines with `on_update: keep`: weights change under running answers, and every token says its version."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from test_server_engine import collect, expected, request, running, tokens

from counting_engine import until
from rillflow.contracts import Patch
from rillflow.engine.servers import base as module
from rillflow.engine.servers.calls import Part, _chunks
from rillflow.errors import EngineLost, WeightsError
from rillflow.types import Chunk, Grammar, Probe

PROBE = Probe(prompts=[[1, 2, 3]], logprobs=[[-1.0, -1.0]], tolerance=0.1)


def versions(chunks: list[Chunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.tokens]


async def test_answers_go_on_while_weights_change() -> None:
    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.load({}, 1)
        await engine.patch(Patch(1, {}, {}), 2)
        engine.give(100)
        await task
        assert tokens(chunks) == expected(request())
        assert versions(chunks) == [0] * 7 + [2] * 13
        assert not any(chunk.seam for chunk in chunks), "nothing was cut"
        assert len(engine.asked) == 1
        assert engine.log == ["up", "apply", "apply"]
        assert (engine.version, engine.stats().loads) == (2, 2)


async def test_tokens_of_new_weights_wait_for_their_proof() -> None:
    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(4)
        await until(lambda: len(tokens(chunks)) == 4)
        engine.scored.clear()
        change = asyncio.create_task(engine.load({}, 1, PROBE))
        await until(lambda: "score" in engine.log)
        engine.give(100)
        await asyncio.sleep(0.02)
        assert versions(chunks) == [0] * 4
        engine.scored.set()
        await change
        await task
        assert (tokens(chunks), versions(chunks)) == (expected(request()), [0] * 4 + [1] * 16)


@pytest.mark.parametrize("outcome", ["wrong", "unlike the probe"])
async def test_tokens_of_wrong_weights_are_sampled_again(outcome: str) -> None:
    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        answers = [asyncio.create_task(collect(engine, request(), into)) for into in (chunks, [])]
        engine.give(8)
        await until(lambda: engine.stats().generated_tokens == 8)
        before = len(tokens(chunks))
        engine.scored.clear()
        engine.logprob = -9.0
        change = asyncio.create_task(engine.load({"outcome": outcome}, 1, PROBE))  # type: ignore[dict-item]
        if outcome != "wrong":
            await until(lambda: "score" in engine.log)
            engine.give(6)  # of the wrong weights
            await asyncio.sleep(0.02)
            engine.scored.set()
        with pytest.raises(WeightsError):
            await change
        assert engine.version == module.UNKNOWN
        assert not engine.running
        engine.logprob = -1.0
        engine.scored.set()
        await engine.load({}, 1, PROBE)
        engine.give(100)
        await asyncio.gather(*answers)
        assert tokens(chunks) == expected(request())
        assert versions(chunks) == [0] * before + [1] * (20 - before)
        assert engine.asked[-1][0] == 1


async def test_tokens_of_wrong_weights_are_dropped_if_the_server_does_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)

    async def broken() -> None:
        raise EngineLost("it does not answer")

    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(4)
        await until(lambda: len(tokens(chunks)) == 4)
        engine.scored.clear()
        engine.logprob = -9.0
        change = asyncio.create_task(engine.load({}, 1, PROBE))
        await until(lambda: "score" in engine.log)
        engine.give(6)
        await asyncio.sleep(0.02)
        monkeypatch.setattr(engine, "cut", broken)
        engine.scored.set()
        with pytest.raises(WeightsError):
            await change
        engine.give(100)
        with pytest.raises(EngineLost):
            await task
        assert versions(chunks) == [0] * 4


async def test_an_answer_that_is_scored_at_its_end_waits_for_the_proof() -> None:
    async with running(on_update="keep") as engine:
        first = asyncio.create_task(collect(engine, request(), []))
        await until(lambda: engine.running == 1)
        engine.scored.clear()
        change = asyncio.create_task(engine.load({}, 1, PROBE))
        await until(lambda: "score" in engine.log)
        whole = asyncio.create_task(collect(engine, request(grammar=Grammar(kind="regex", text="a*")), []))
        await asyncio.sleep(0.02)
        assert engine.running == 1
        engine.scored.set()
        await change
        engine.give(100)
        await first
        await whole
        assert engine.asked[-1][0] == 1


async def test_weights_that_do_not_fit_cut_nothing() -> None:
    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(3)
        await until(lambda: len(tokens(chunks)) == 3)
        with pytest.raises(WeightsError):
            await engine.patch(Patch(5, {}, {}), 6)
        engine.give(100)
        await task
        assert versions(chunks) == [0] * 20
        assert "cut" not in engine.log


async def test_an_answer_that_is_scored_at_its_end_is_cut() -> None:
    """Its log-probs are computed from the weights of then, for all of its tokens."""
    async with running(on_update="keep") as engine:
        asked = request(grammar=Grammar(kind="regex", text="a*"))
        task = asyncio.create_task(collect(engine, asked, []))
        await until(lambda: engine.running == 1)
        await engine.load({}, 1)
        assert engine.log == ["up", "cut", "apply", "go on"]
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_pause_still_cuts() -> None:
    async with running(on_update="keep") as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(3)
        await until(lambda: len(tokens(chunks)) == 3)
        await engine.pause()
        await engine.load({}, 1)
        await engine.resume()
        engine.give(100)
        await task
        assert (tokens(chunks), versions(chunks)) == (expected(request()), [0] * 3 + [1] * 17)
        assert [chunk.seam for chunk in chunks if chunk.seam] == ["paused"]


def test_a_part_of_several_versions_becomes_a_chunk_for_each() -> None:
    part = Part([4, 5, 6], [-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0], "stop", b"experts", [1, 1, 2])
    first, last = _chunks(part, "stop", 0)
    assert (first.tokens, first.raw_logprobs, first.version, first.finish, first.experts) == (
        [4, 5],
        [-4.0, -5.0],
        1,
        None,
        b"",
    )
    assert (last.tokens, last.logprobs, last.version, last.finish, last.experts) == ([6], [-3.0], 2, "stop", b"experts")
    (end,) = _chunks(Part([], [], [], "stop"), "stop", 3)
    assert (end.tokens, end.version, end.finish) == ([], 3, "stop")
