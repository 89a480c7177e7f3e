"""The memory of an engine's KV cache: too much of it is refused, and a paused engine gives it back without an effect on
the tokens of running answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rillflow.engine.embedded import cache as module
from rillflow.engine.embedded.cache import make_cache
from rillflow.engine.host import EngineHost, Frees
from rillflow.errors import EngineError
from rillflow.types import GenerateRequest, Sampling


async def cut(kit: Any, engine: Any, tasks: list[asyncio.Task[Any]]) -> int:
    """Pause once some tokens were drawn; how many were."""
    await kit.until(lambda: engine.stats().generated_tokens >= 10 * len(tasks))
    await engine.pause()
    return int(engine.stats().generated_tokens)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("on_update", ["refill", "keep"])
async def test_what_was_freed_is_computed_again_and_no_token_differs(kit: Any, family: str, on_update: str) -> None:
    prompts = [kit.prompt(20), kit.prompt(20), kit.prompt(33)]
    model, plain = kit.pair(family)
    async with kit.running(model, on_update=on_update) as engine:
        whole = engine.cache_bytes
        expected = [await kit.ask(engine, tokens, max_tokens=40, seed=at) for at, tokens in enumerate(prompts)]
        drawn = engine.stats().generated_tokens
        tasks = [
            asyncio.create_task(kit.ask(engine, tokens, max_tokens=40, seed=at)) for at, tokens in enumerate(prompts)
        ]
        await kit.until(lambda: engine.stats().generated_tokens >= drawn + 30)
        await engine.pause()
        assert engine.cache_bytes == whole > 0
        await engine.free()
        assert engine.cache_bytes == 0
        await engine.free()  # again: nothing is left to give
        await engine.resume()
        answers = await asyncio.gather(*tasks)
        assert engine.cache_bytes == whole
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(plain, answer), abs=1e-5)


async def test_weights_may_come_while_nothing_is_held(kit: Any) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model) as engine:
        task = asyncio.create_task(kit.ask(engine, kit.prompt(20), max_tokens=40, seed=1))
        drawn = await cut(kit, engine, [task])
        await engine.free()
        await engine.load({name: tensor.clone() for name, tensor in new.state_dict().items()}, 7)
        assert engine.cache_bytes == 0, "a load needs no cache"
        await engine.resume()
        answer = await task
    assert answer.versions == [0] * drawn + [7] * (40 - drawn)
    assert answer.raw_logprobs[drawn:] == pytest.approx(kit.plain(new, answer)[drawn:], abs=1e-5)


async def test_exact_readings_are_given_back_too(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, exact=True) as engine:
        expected = await kit.ask(engine, kit.prompt(20), max_tokens=30, seed=1)
        task = asyncio.create_task(kit.ask(engine, kit.prompt(20), max_tokens=30, seed=1))
        await kit.until(lambda: engine.stats().generated_tokens >= 40)
        await engine.pause()
        await engine.free()
        await engine.resume()
        answer = await task
    assert (answer.tokens, answer.raw_logprobs) == (expected.tokens, expected.raw_logprobs)


async def test_an_idle_engine_samples_again_after_it_was_freed(kit: Any) -> None:
    model, plain = kit.pair()
    async with kit.running(model) as engine:
        await engine.pause()
        await engine.free()
        await engine.resume()
        answer = await kit.ask(engine, kit.prompt(20), max_tokens=10, seed=1)
    assert answer.raw_logprobs == pytest.approx(kit.plain(plain, answer), abs=1e-5)


async def test_held_engines_free_memory_on_request(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        assert isinstance(engine, Frees)
        host, busy = EngineHost("e", {"p": engine}), list[bool]()
        host.on_busy = busy.append
        asked = GenerateRequest(id="r", tokens=kit.prompt(20), sampling=Sampling(max_tokens=100, seed=1), group="")
        task = asyncio.create_task(_count(host, asked))
        await kit.until(lambda: engine.stats().generated_tokens >= 5)
        await host.hold("keeping")
        assert engine.cache_bytes
        await host.hold("training")
        await host.free()
        assert engine.cache_bytes == 0
        await host.release("keeping")
        assert engine.cache_bytes == 0
        await host.release("training")
        assert await task == 100
    assert busy == [True, False, True, False]


async def _count(host: EngineHost, asked: GenerateRequest) -> int:
    return sum([len(chunk.tokens) async for chunk in host.generate("p", asked)])


def test_a_freed_cache_holds_nothing() -> None:
    from rillflow.engine.embedded.cache import KVCache

    cache = KVCache(layers=2, slots=3, heads=2, context=8, head_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.bytes == 2 * 2 * 3 * 2 * 9 * 4 * 4
    cache.free()
    assert cache.bytes == 0
    cache.clear()
    assert cache.bytes == 2 * 2 * 3 * 2 * 9 * 4 * 4


def test_a_cache_that_does_not_fit_the_memory_is_refused(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is allocated, with the settings to change: an allocation that the system cannot back ends the process
    later."""
    model, _ = kit.pair("qwen3")
    room = make_cache(model, 3, 200).bytes
    monkeypatch.setattr(module, "free_bytes", lambda device: room)
    assert make_cache(model, 3, 200).bytes == room
    with pytest.raises(
        EngineError, match=r"4 slots \(engine.slots\) of 200 tokens \(engine.context\) needs"
    ) as refused:
        make_cache(model, 4, 200)
    assert "3 slots of 200 tokens fit" in refused.value.hint
    with pytest.raises(EngineError, match="needs") as refused:
        make_cache(model, 1 << 30, 200)
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    with pytest.raises(EngineError, match="needs") as refused:
        make_cache(model, 1, 200)
    assert "not one slot fits" in refused.value.hint


def test_free_memory_is_that_of_the_machine() -> None:
    assert 0 < module.free_bytes(torch.device("cpu")) < 1 << 50
