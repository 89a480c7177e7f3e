"""New weights in flight: nothing is dropped, no version is mixed into another's token, refused sets change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rillflow.errors import WeightsError

FAMILIES = ["qwen3", "qwen2", "llama", "mistral"]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
async def test_load_in_flight_switches_between_two_tokens(kit: Any, family: str) -> None:
    model, old = kit.pair(family)
    new = kit.build(family, seed=1)
    shared = kit.prompt(20)
    prompts = [shared, shared, [*shared, 3], *[kit.prompt(7 + i, seed=i) for i in range(5)]]
    async with kit.running(model, slots=6) as engine:
        tasks = [
            asyncio.create_task(kit.ask(engine, tokens, max_tokens=40 + i, seed=i)) for i, tokens in enumerate(prompts)
        ]
        await kit.until(lambda: engine.stats().generated_tokens > 90)
        await engine.load(weights(new), 5)
        assert engine.version == 5
        answers = await asyncio.gather(*tasks)
        assert engine.stats().loads == 1
    assert any(0 in answer.versions and 5 in answer.versions for answer in answers)
    for index, answer in enumerate(answers):
        assert len(answer.tokens) == 40 + index
        assert answer.versions == sorted(answer.versions)
        by_version = {0: kit.plain(old, answer), 5: kit.plain(new, answer)}
        expected = [by_version[version][at] for at, version in enumerate(answer.versions)]
        assert answer.raw_logprobs == pytest.approx(expected, abs=1e-5)


async def test_residents_of_old_weights_are_not_reused(kit: Any) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model) as engine:
        await kit.ask(engine, kit.prompt(30), max_tokens=5, seed=1)
        await engine.load(weights(new), 1)
        answer = await kit.ask(engine, kit.prompt(30), max_tokens=5, seed=1)
        assert engine.stats().reused_tokens == 0
    assert answer.raw_logprobs == pytest.approx(kit.plain(new, answer), abs=1e-5)


async def test_load_while_paused(kit: Any) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model) as engine:
        task = asyncio.create_task(kit.ask(engine, kit.prompt(6), max_tokens=40, seed=1))
        await kit.until(lambda: engine.stats().generated_tokens > 10)
        await engine.pause()
        produced = engine.stats().generated_tokens
        await engine.load(weights(new), 1)
        assert engine.stats().generated_tokens == produced
        await engine.resume()
        answer = await task
    assert answer.versions == [0] * produced + [1] * (40 - produced)


async def test_tied_weights_may_come_once_or_twice(kit: Any) -> None:
    model, _ = kit.pair()  # the head shares the embedding's weights
    new = kit.build(seed=1)
    full = weights(new)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(full)
    async with kit.running(model) as engine:
        for version, absent in enumerate(("lm_head.weight", "model.embed_tokens.weight", ""), start=1):
            await engine.load({name: tensor for name, tensor in full.items() if name != absent}, version)
            answer = await kit.ask(engine, kit.prompt(9), max_tokens=5, seed=version)
            assert answer.raw_logprobs == pytest.approx(kit.plain(new, answer), abs=1e-5)


def _missing(full: dict[str, torch.Tensor]) -> None:
    del full["model.norm.weight"]


def _unknown(full: dict[str, torch.Tensor]) -> None:
    full["model.extra.weight"] = torch.zeros(1)


def _shape(full: dict[str, torch.Tensor]) -> None:
    full["model.norm.weight"] = torch.zeros(33)


def _dtype(full: dict[str, torch.Tensor]) -> None:
    full["model.norm.weight"] = full["model.norm.weight"].bfloat16()


def _untied(full: dict[str, torch.Tensor]) -> None:
    full["lm_head.weight"] = full["lm_head.weight"] + 1


@pytest.mark.parametrize("spoil", [_missing, _unknown, _shape, _dtype, _untied])
async def test_weights_that_do_not_fit_change_nothing(kit: Any, spoil: Any) -> None:
    model, old = kit.pair()
    full = weights(kit.build(seed=1))
    spoil(full)
    async with kit.running(model) as engine:
        await kit.ask(engine, kit.prompt(30), max_tokens=5, seed=1)
        with pytest.raises(WeightsError) as caught:
            await engine.load(full, 1)
        assert caught.value.hint
        assert (engine.version, engine.stats().loads) == (0, 0)
        answer = await kit.ask(engine, kit.prompt(30), max_tokens=5, seed=1)
        assert engine.stats().reused_tokens > 0
    assert answer.versions == [0] * 5
    assert answer.raw_logprobs == pytest.approx(kit.plain(old, answer), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_model_itself_carries_the_loaded_weights(kit: Any, family: str) -> None:
    """The fused matrices and the model's parameters are the same memory."""
    model, _ = kit.pair(family)
    new = kit.build(family, seed=1)
    async with kit.running(model) as engine:
        await engine.load(weights(new), 1)
    for name, tensor in new.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
