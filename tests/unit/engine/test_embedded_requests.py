"""The life of a request: its ends, refusals, and that none is left hanging."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from rillflow.engine.embedded import EmbeddedEngine
from rillflow.errors import ContextOverflow, EngineError, QueueFull
from rillflow.weights.models import load_policy_model


async def test_stop_token_ends_and_is_included(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        free = await kit.ask(engine, kit.prompt(10), max_tokens=30, seed=1)
        stop = free.tokens[11]
        ended = await kit.ask(engine, kit.prompt(10), max_tokens=30, seed=1, stop_tokens=(96_000, stop, 3_000_000_000))
    first = free.tokens.index(stop)
    assert ended.tokens == free.tokens[: first + 1]
    assert ended.finish == "stop"
    assert free.finish == "length"


async def test_the_context_ends_a_generation(kit: Any) -> None:
    model, reference = kit.pair()
    async with kit.running(model, context=32) as engine:
        answer = await kit.ask(engine, kit.prompt(20), max_tokens=100, seed=1)
        last = await kit.ask(engine, kit.prompt(31), max_tokens=100, seed=1)
    assert (len(answer.tokens), answer.finish) == (12, "length")
    assert (len(last.tokens), last.finish) == (1, "length")
    assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


async def test_a_prompt_without_room_is_refused_at_once(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, context=32) as engine:
        with pytest.raises(ContextOverflow, match="32 tokens") as caught:
            engine.generate(kit.request(kit.prompt(32)))
        assert caught.value.hint


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ([], {}),
        ([97], {}),
        ([-1], {}),
        ([1], {"max_tokens": 0}),
        ([1], {"temperature": -1.0}),
        ([1], {"temperature": float("nan")}),
        ([1], {"top_p": 0.0}),
        ([1], {"top_k": -1}),
    ],
)
async def test_nonsense_is_refused_before_it_can_hurt_others(kit: Any, tokens: list[int], sampling: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        with pytest.raises(EngineError):
            engine.generate(kit.request(tokens, **sampling))


async def test_the_queue_is_bounded(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, queue=3) as engine:
        await engine.pause()
        streams = [engine.generate(kit.request([1, 2], max_tokens=2)) for _ in range(3)]
        with pytest.raises(QueueFull):
            engine.generate(kit.request([1, 2]))
        assert engine.stats().waiting == 3
        await engine.resume()
        for stream in streams:
            assert sum([len(chunk.tokens) async for chunk in stream]) == 2


async def test_closing_frees_the_slot_while_others_go_on(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=2) as engine:
        other = asyncio.create_task(kit.ask(engine, kit.prompt(5, seed=2), max_tokens=60, seed=1))
        stream = engine.generate(kit.request(kit.prompt(5), max_tokens=100))
        await kit.until(lambda: engine.stats().running == 2)
        queued = engine.generate(kit.request([1], max_tokens=100))
        assert engine.stats().waiting == 1
        await queued.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await kit.until(lambda: engine.stats().running == 1)
        assert engine.stats().waiting == 0
        assert len((await other).tokens) == 60


async def test_dropping_the_iterator_aborts_too(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=1) as engine:
        stream = engine.generate(kit.request(kit.prompt(5), max_tokens=100))
        await kit.until(lambda: engine.stats().running == 1)
        del stream
        gc.collect()
        await kit.until(lambda: engine.stats().running == 0)
        assert engine.stats().generated_tokens < 100


async def test_pause_stops_sampling_and_resume_goes_on(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        undisturbed = await kit.ask(engine, kit.prompt(8), max_tokens=40, seed=3)
        before = engine.stats().generated_tokens
        task = asyncio.create_task(kit.ask(engine, kit.prompt(8), max_tokens=40, seed=3))
        await kit.until(lambda: engine.stats().generated_tokens > before + 10)
        await engine.pause()
        held = engine.stats()
        await asyncio.sleep(0.05)
        assert engine.stats() == held
        assert held.running == 1
        await engine.resume()
        assert (await task).tokens == undisturbed.tokens


async def test_a_slow_reader_gets_merged_chunks(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        stream = engine.generate(kit.request(kit.prompt(8), max_tokens=50, seed=3))
        await kit.until(lambda: engine.stats().generated_tokens == 50)
        await asyncio.sleep(0)
        chunks = [chunk async for chunk in stream]
    assert [len(chunk.tokens) for chunk in chunks] == [50]
    assert chunks[0].finish == "length"


async def test_a_failed_step_reaches_every_caller(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=2) as engine:
        tasks = [asyncio.create_task(kit.ask(engine, kit.prompt(5, seed=i), max_tokens=80)) for i in range(5)]
        await kit.until(lambda: engine.stats().generated_tokens > 10)

        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(engine._core, "_forward", broken)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(result, EngineError) and "out of memory" in str(result) for result in results)
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert len((await kit.ask(engine, kit.prompt(5), max_tokens=4)).tokens) == 4


async def test_weights_that_are_not_finite_are_named_and_leave_no_trace(kit: Any) -> None:
    model, reference = kit.pair()
    good = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items() if name != "lm_head.weight"}
    async with kit.running(model) as engine:
        await engine.load(bad, 1)
        with pytest.raises(EngineError, match="version 1"):
            await kit.ask(engine, kit.prompt(20), max_tokens=4)
        await engine.load(good, 2)
        answer = await kit.ask(engine, kit.prompt(20), max_tokens=30, seed=1)
    assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


async def test_closing_the_engine_answers_everyone(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=1) as engine:
        tasks = [asyncio.create_task(kit.ask(engine, kit.prompt(5), max_tokens=100)) for _ in range(3)]
        await kit.until(lambda: engine.stats().running == 1)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineError) and "closed" in str(result) for result in results)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(kit.request([1]))


async def test_an_idle_engine_does_not_step(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        await kit.ask(engine, kit.prompt(5), max_tokens=4)
        steps = engine.stats().steps
        await asyncio.sleep(0.05)
        assert engine.stats().steps == steps


def test_what_the_engine_cannot_run_is_refused(kit: Any) -> None:
    model, _ = kit.pair()
    with pytest.raises(EngineError, match="context 257"):
        EmbeddedEngine(model, context=257)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(EngineError, match="linear_attention"):
        EmbeddedEngine(model, context=64)


async def test_a_saved_model_is_loaded(kit: Any, tmp_path: Any) -> None:
    model, reference = kit.pair()
    model.save_pretrained(tmp_path)
    async with kit.running(load_policy_model(str(tmp_path), "fp32", torch.device("cpu"))) as engine:
        answer = await kit.ask(engine, kit.prompt(20), max_tokens=5, seed=1)
    assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)
