"""Engines that are servers: exact versions, answers that are cut and go on, servers that die."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_server import GIVEN_UP, STALLED, FakeServer, token_at

from counting_engine import until
from rillflow.contracts import Patch
from rillflow.engine.servers import base as module
from rillflow.engine.servers import calls
from rillflow.engine.servers.calls import TRIES
from rillflow.errors import ContextOverflow, EngineError, EngineLost, QueueFull, WeightsError
from rillflow.types import Chunk, GenerateRequest, Grammar, Sampling


def request(prompt: int = 5, count: int = 20, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id="r", tokens=list(range(prompt)), sampling=Sampling(max_tokens=count, **sampling))


def expected(asked: GenerateRequest) -> list[int]:
    return [token_at(len(asked.tokens) + number) for number in range(asked.sampling.max_tokens)]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


async def collect(engine: FakeServer, asked: GenerateRequest, chunks: list[Chunk]) -> list[Chunk]:
    async for chunk in engine.generate(asked):
        chunks.append(chunk)
    return chunks


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[FakeServer]:
    engine = FakeServer(**settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_new_weights_cut_between_two_tokens_and_every_token_has_its_version() -> None:
    async with running() as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.load({}, 1)
        engine.give(6)
        await until(lambda: len(tokens(chunks)) == 13)
        await engine.patch(Patch(1, {}, {}), 2)
        engine.give(100)
        await task
        assert tokens(chunks) == expected(request()), "nothing is lost, nothing comes twice"
        versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
        assert versions == [0] * 7 + [1] * 6 + [2] * 7
        seams = [chunk.seam for chunk in chunks for _ in chunk.tokens[:1]]
        assert [seam for seam in seams if seam] == ["weights", "weights"]
        assert chunks[-1].finish == "length"
        asked = [(version, len(one.tokens), one.sampling.max_tokens) for version, one in engine.asked]
        assert asked == [(0, 5, 20), (1, 12, 13), (2, 18, 7)]
        assert engine.log == ["up", "cut", "apply", "go on", "cut", "apply", "go on"]
        assert all(update.closed for update in engine.updates)
        stats = engine.stats()
        assert (stats.version, stats.loads, stats.generated_tokens) == (2, 2, 20)


async def test_an_engine_samples_while_it_waits_for_its_turn() -> None:
    async with running() as engine:
        free, ready = asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def turn() -> AsyncIterator[None]:
            assert ready.is_set(), "an update is prepared before its turn"
            engine.log.append("asks")
            await free.wait()
            yield
            engine.log.append("done")

        engine.turn, engine.get_ready = turn, ready.set
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        load = asyncio.create_task(engine.load({}, 1))
        await until(lambda: "asks" in engine.log)
        engine.give(9)
        await until(lambda: len(tokens(chunks)) == 9)
        await engine.pause()  # nothing else waits for the turn
        await engine.resume()
        free.set()
        await load
        engine.give(100)
        await task
        assert [chunk.version for chunk in chunks for _ in chunk.tokens] == [0] * 9 + [1] * 11
        assert engine.log == ["up", "asks", "cut", "go on", "cut", "apply", "go on", "done"]


async def test_requests_that_come_while_weights_change_wait_for_them() -> None:
    async with running() as engine:
        go = asyncio.Event()
        prepare = engine.prepare_load

        async def slow(tensors: Any) -> Any:
            update = await prepare(tensors)
            plain = update.apply

            async def apply() -> None:
                await go.wait()
                await plain()

            update.apply = apply  # type: ignore[method-assign]
            return update

        engine.prepare_load = slow  # type: ignore[method-assign]
        engine.give(100)
        load = asyncio.create_task(engine.load({}, 1))
        await until(lambda: not engine._calls._open.is_set())
        task = asyncio.create_task(collect(engine, request(), []))
        await asyncio.sleep(0.01)
        assert not engine.asked
        go.set()
        await load
        assert {chunk.version for chunk in await task} == {1}


async def test_a_server_that_does_not_cut_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_CUT_SECONDS", 0.02)
    async with running(deaf=True) as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(7)
        await until(lambda: len(tokens(chunks)) == 7)
        await engine.load({}, 1)
        engine.give(100)
        await task
        assert tokens(chunks) == expected(request())
        assert [chunk.version for chunk in chunks for _ in chunk.tokens] == [0] * 7 + [1] * 13


async def test_weights_that_came_fast_wait_for_answers_to_get_on() -> None:
    async with running() as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(1)
        await until(lambda: len(tokens(chunks)) == 1)
        await engine.load({}, 1)
        second = asyncio.create_task(engine.load({}, 2))
        await until(lambda: engine.running == 1)
        await asyncio.sleep(0.01)
        assert engine.version == 1
        assert not second.done()
        engine.give(1)
        await second
        engine.give(100)
        await task
        assert [chunk.version for chunk in chunks for _ in chunk.tokens] == [0, 1] + [2] * 18


async def test_pause_holds_and_resume_goes_on() -> None:
    async with running() as engine:
        chunks: list[Chunk] = []
        task = asyncio.create_task(collect(engine, request(), chunks))
        engine.give(3)
        await until(lambda: len(tokens(chunks)) == 3)
        await engine.pause()
        assert engine.running == 0
        await engine.load({}, 1)
        engine.give(100)
        await asyncio.sleep(0.01)
        assert len(tokens(chunks)) == 3
        assert "go on" not in engine.log, "paused, it stays so through an update"
        await engine.resume()
        await task
        assert tokens(chunks) == expected(request())
        assert [chunk.version for chunk in chunks for _ in chunk.tokens] == [0] * 3 + [1] * 17


async def test_weights_that_do_not_fit_change_nothing() -> None:
    async with running() as engine:
        with pytest.raises(WeightsError):
            await engine.load({"outcome": "unfit"}, 1)  # type: ignore[dict-item]
        with pytest.raises(WeightsError, match="version 5"):
            await engine.patch(Patch(5, {}, {}), 6)
        engine.give(100)
        assert {chunk.version for chunk in await collect(engine, request(), [])} == {0}


async def test_nothing_is_sampled_from_weights_that_arrived_wrong() -> None:
    async with running() as engine:
        with pytest.raises(WeightsError):
            await engine.load({"outcome": "wrong"}, 1)  # type: ignore[dict-item]
        assert engine.version == module.UNKNOWN
        engine.give(100)
        task = asyncio.create_task(collect(engine, request(), []))
        await asyncio.sleep(0.01)
        assert not engine.asked
        with pytest.raises(WeightsError):
            await engine.patch(Patch(0, {}, {}), 2)
        await engine.load({}, 2)
        assert {chunk.version for chunk in await task} == {2}


async def test_nothing_is_sampled_after_a_change_that_was_broken_off() -> None:
    async with running() as engine:
        change = asyncio.create_task(engine.load({"outcome": "slow"}, 1))  # type: ignore[dict-item]
        await until(lambda: "apply" in engine.log)
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
        assert engine.version == module.UNKNOWN, "who knows what was written"
        engine.give(100)
        task = asyncio.create_task(collect(engine, request(), []))
        await asyncio.sleep(0.01)
        assert not engine.asked
        await engine.load({}, 2)
        assert {chunk.version for chunk in await task} == {2}


async def test_a_server_that_does_not_do_what_it_is_told_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    async with running() as engine:
        with pytest.raises(EngineLost):
            await engine.load({"outcome": "silent"}, 1)  # type: ignore[dict-item]
        await until(lambda: engine.log.count("up") == 2 and engine.version == 0)
        engine.give(100)
        await engine.load({}, 2)
        assert {chunk.version for chunk in await collect(engine, request(), [])} == {2}


async def test_an_answer_that_stalls_is_lost() -> None:
    async with running() as engine:
        with pytest.raises(EngineLost, match="silent"):
            async with asyncio.timeout(60):
                await collect(engine, request(seed=STALLED), [])
        assert len(engine.asked) == 1


async def test_an_answer_that_the_server_gives_up_again_and_again_is_lost() -> None:
    async with running() as engine:
        with pytest.raises(EngineLost, match="gives up"):
            async with asyncio.timeout(60):
                await collect(engine, request(seed=GIVEN_UP), [])
        assert len(engine.asked) == TRIES


async def test_nobody_waits_for_a_server_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    failures = iter([False])

    def start() -> None:
        if next(failures, True):
            raise OSError("no space left on device")

    async with running(start=start) as engine:
        engine.die()
        await until(lambda: engine.log.count("up") >= 4)
        async with asyncio.timeout(60):
            await engine.pause()
            with pytest.raises(EngineLost, match="is down"):
                await engine.load({}, 1)
            await engine.resume()
        assert not engine.updates, "nothing is prepared for a server that is down"


async def test_a_server_that_dies_loses_its_answers_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    failures = [EngineLost("no port"), None, None]

    def start() -> None:
        error = failures.pop() if engine.log.count("up") > 1 else None
        if error is not None:
            raise error

    engine = FakeServer(start=start)
    failures.reverse()
    await engine.start()
    await engine.load({}, 3)
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(engine, request(), chunks))
    engine.give(4)
    await until(lambda: len(tokens(chunks)) == 4)
    engine.die()
    with pytest.raises(EngineLost):
        await task
    await until(lambda: engine.log.count("up") == 3 and engine.version == 0)
    engine.give(100)
    late = asyncio.create_task(collect(engine, request(), []))
    await asyncio.sleep(0.01)
    assert not late.done(), "not before it has weights again"
    await engine.load({}, 3)
    assert {chunk.version for chunk in await late} == {3}
    await engine.close()


async def test_a_server_that_came_back_does_not_wait_for_weights_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(module, "_WEIGHTS_SECONDS", 0.02)
    async with running() as engine:
        await engine.load({}, 3)
        engine.die()
        await until(lambda: engine.log.count("up") == 2)
        engine.give(100)
        assert {chunk.version for chunk in await collect(engine, request(), [])} == {0}


async def test_closing_and_dropping_abort() -> None:
    async with running() as engine:
        first, second = engine.generate(request()), engine.generate(request())
        await until(lambda: engine.running == 2)
        await first.aclose()  # type: ignore[attr-defined]
        await until(lambda: engine.running == 1)
        del second
        gc.collect()
        await until(lambda: engine.running == 0)
        assert engine.stats().waiting == 0


async def test_the_queue_is_bounded() -> None:
    async with running(queue=3, slots=2) as engine:
        await engine.pause()
        streams = [engine.generate(request(count=2)) for _ in range(3)]
        with pytest.raises(QueueFull):
            engine.generate(request())
        await engine.resume()
        engine.give(100)
        for stream in streams:
            assert sum([len(chunk.tokens) async for chunk in stream]) == 2


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, EngineError),
        ([1000], {}, EngineError),
        ([-1], {}, EngineError),
        ([1], {"max_tokens": 0}, EngineError),
        ([1], {"temperature": float("nan")}, EngineError),
        ([1], {"temperature": 0.005}, EngineError),
        ([1], {"top_p": 0.0}, EngineError),
        ([1] * 128, {}, ContextOverflow),
    ],
)
async def test_nonsense_is_refused_at_once(prompt: list[int], sampling: Any, error: type[Exception]) -> None:
    async with running() as engine:
        with pytest.raises(error):
            engine.generate(GenerateRequest(id="r", tokens=prompt, sampling=Sampling(**sampling)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 1),
        ("logit_bias", {"5": 9}),
        ("typical_p", 0.5),
    ],
)
def test_an_engine_refuses_by_name_what_it_does_not_apply(name: str, value: Any) -> None:
    """The gateway has refused it before (`test_odd_values.py`)."""
    asked = {"id": "r", "tokens": [1], "sampling": {"temperature": 0.6, name: value}}
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=GenerateRequest)


@pytest.mark.parametrize(
    ("raw", "error"),
    [([math.nan], "not finite"), ([-math.inf], "not finite"), ([], "1 log-probs and 0 of the model's")],
)
async def test_a_token_without_both_log_probs_ends_the_answer_with_an_error(raw: list[float], error: str) -> None:
    async with running() as engine:
        engine.raw = raw
        engine.give(1)
        with pytest.raises(EngineError, match=error):
            await collect(engine, request(), [])


async def test_closing_answers_everyone() -> None:
    async with running() as engine:
        task = asyncio.create_task(collect(engine, request(), []))
        await until(lambda: engine.running == 1)
    with pytest.raises(EngineLost, match="closed"):
        await task
    with pytest.raises(EngineLost, match="closed"):
        engine.generate(request())
    assert engine.log == ["up", "down"]


async def test_a_server_that_does_not_start_leaves_nothing_behind() -> None:
    def refuse() -> None:
        raise EngineLost("no such interpreter")

    engine = FakeServer(start=refuse)
    with pytest.raises(EngineLost, match="interpreter"):
        await engine.start()
    assert engine.log == ["up", "down"]


async def test_new_weights_wait_longer_for_answers_that_come_whole() -> None:
    """A cut answer under a grammar starts again: continuous updates would never let it end."""
    async with running() as engine:
        grammar = Grammar(kind="regex", text="a")
        task = asyncio.create_task(collect(engine, request(count=2, grammar=grammar), []))
        await until(lambda: engine.running == 1)
        await engine.load({}, 1)
        await until(lambda: engine.running == 1)
        (call,) = engine._calls._calls
        assert (call.owed, call.whole) == (True, True)
        second = asyncio.create_task(engine.load({}, 2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.version == 1, "it waits for the answer"
        engine.give(2)
        chunks = await task
        await second
    assert {chunk.version for chunk in chunks if chunk.tokens} == {1}


async def test_an_answer_under_a_grammar_that_another_engine_began_is_refused() -> None:
    async with running() as engine:
        begun = request(grammar=Grammar(kind="regex", text="a"))
        with pytest.raises(EngineError, match="cannot be continued"):
            engine.generate(GenerateRequest(id="r", tokens=begun.tokens, sampling=begun.sampling, begun=2))


async def test_a_start_says_which_server_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr("rillflow.storage.startup.doing", stages.append)
    engine = FakeServer()
    await engine.start()
    await engine.close()
    assert stages == ["waiting for vLLM to load the model"]
