"""Patches in flight: as exact as a load, of a few weights only; a refused one changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rillflow.contracts import Change, Patch
from rillflow.errors import WeightsError

FAMILIES = ["qwen3", "qwen2", "llama", "mistral"]
TIED = {"lm_head.weight", "model.embed_tokens.weight"}


def changed(model: Any, share: float, seed: int = 0) -> Any:
    """Change `count` of the model's weights, at random places of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            places = torch.rand(parameter.shape, generator=generator) < share
            parameter[places] += 0.3 * torch.randn(int(places.sum()), generator=generator)
    return model


def patch_between(old: Any, new: Any, base: int = 0, dense: bool = False) -> Patch:
    changes = {}
    for (name, before), after in zip(old.named_parameters(), new.parameters(), strict=True):
        index_K = (before.detach() != after.detach()).view(-1).nonzero().view(-1)
        values = after.detach().reshape(-1)
        changes[name] = Change(None, values) if dense else Change(index_K, values[index_K])
    return Patch(base, changes, {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dense", [False, True])
async def test_a_patch_in_flight_switches_between_two_tokens(kit: Any, family: str, dense: bool) -> None:
    model, old = kit.pair(family)
    new = changed(kit.build(family), 0.1)
    shared = kit.prompt(20)
    prompts = [shared, [*shared, 3], *[kit.prompt(7 + i, seed=i) for i in range(5)]]
    async with kit.running(model, slots=6) as engine:
        tasks = [asyncio.create_task(kit.ask(engine, p, max_tokens=40 + i, seed=i)) for i, p in enumerate(prompts)]
        await kit.until(lambda: engine.stats().generated_tokens > 90)
        await engine.patch(patch_between(old, new, dense=dense), 5)
        assert engine.version == 5
        answers = await asyncio.gather(*tasks)
        assert engine.stats().loads == 1
        assert engine.stats().load_seconds > 0
    assert any(0 in answer.versions and 5 in answer.versions for answer in answers)
    for answer in answers:
        by_version = {0: kit.plain(old, answer), 5: kit.plain(new, answer)}
        expected = [by_version[version][at] for at, version in enumerate(answer.versions)]
        assert answer.raw_logprobs == pytest.approx(expected, abs=1e-5)
    for name, tensor in new.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("on_update", ["refill", "keep"])
async def test_a_patch_obeys_on_update(kit: Any, on_update: str) -> None:
    model, old = kit.pair()
    new = changed(kit.build(), 0.1)
    async with kit.running(model, on_update=on_update) as engine:
        task = asyncio.create_task(kit.ask(engine, kit.prompt(20), max_tokens=40, seed=1))
        await kit.until(lambda: engine.stats().generated_tokens > 10)
        await engine.pause()
        await engine.patch(patch_between(old, new), 1)
        await engine.resume()
        answer = await task
        assert engine.stats().prefilled_tokens == 20 or on_update == "refill"
        assert engine.stats().prefilled_tokens > 20 or on_update == "keep"
    assert set(answer.versions) == {0, 1}


async def test_patches_follow_one_another(kit: Any) -> None:
    model, first = kit.pair()
    second = changed(kit.build(), 0.1)
    third = changed(changed(kit.build(), 0.1), 0.05, seed=1)
    async with kit.running(model) as engine:
        await engine.patch(patch_between(first, second, 0), 1)
        await engine.patch(patch_between(second, third, 1), 2)
        answer = await kit.ask(engine, kit.prompt(9), max_tokens=9, seed=1)
    assert answer.versions == [2] * 9
    assert answer.raw_logprobs == pytest.approx(kit.plain(third, answer), abs=1e-5)


async def test_tied_weights_may_be_patched_by_any_name(kit: Any) -> None:
    model, old = kit.pair()  # the head shares the embedding's weights
    new = changed(kit.build(), 0.2)
    whole = patch_between(old, new).changes
    (tied,) = TIED & set(whole)
    async with kit.running(model) as engine:
        for version, names in enumerate(({tied}, {(TIED - {tied}).pop()}, TIED)):
            changes = {name: change for name, change in whole.items() if name not in TIED}
            await engine.patch(Patch(version, changes | dict.fromkeys(names, whole[tied]), {}), version + 1)
            answer = await kit.ask(engine, kit.prompt(9), max_tokens=5, seed=version)
            assert answer.raw_logprobs == pytest.approx(kit.plain(new, answer), abs=1e-5)


NORM = "model.norm.weight"


def _one(index_K: torch.Tensor | None, value_K: torch.Tensor, name: str = NORM) -> Callable[[Any], Any]:
    return lambda changes: changes | {name: Change(index_K, value_K)}


BAD: dict[str, Callable[[Any], Any]] = {
    "unknown": _one(None, torch.zeros(1), "model.extra.weight"),
    "dtype": _one(torch.tensor([0]), torch.zeros(1, dtype=torch.bfloat16)),
    "too many values": _one(torch.tensor([0]), torch.zeros(2)),
    "not all values": _one(None, torch.zeros(31)),
    "beyond the end": _one(torch.tensor([0, 32]), torch.zeros(2)),
    "before the start": _one(torch.tensor([-1]), torch.zeros(1)),
    "not ascending": _one(torch.tensor([3, 2]), torch.zeros(2)),
    "twice": _one(torch.tensor([3, 3]), torch.zeros(2)),
    "places of another kind": _one(torch.tensor([3.0]), torch.zeros(1)),
    "tied but different": _one(torch.tensor([0]), torch.ones(1), "lm_head.weight"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_patch_that_does_not_fit_changes_nothing(kit: Any, bad: str) -> None:
    model, old = kit.pair()
    good = patch_between(old, changed(kit.build(), 0.1))
    async with kit.running(model) as engine:
        with pytest.raises(WeightsError) as caught:
            await engine.patch(good._replace(changes=BAD[bad](dict(good.changes))), 1)
        assert caught.value.hint
        assert (engine.version, engine.stats().loads) == (0, 0)
    for name, tensor in old.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


async def test_a_patch_of_another_version_changes_nothing(kit: Any) -> None:
    model, old = kit.pair()
    patch = patch_between(old, changed(kit.build(), 0.1), base=3)
    async with kit.running(model) as engine:
        with pytest.raises(WeightsError, match="version 3 does not fit version 0"):
            await engine.patch(patch, 4)
        assert engine.version == 0
    for name, tensor in old.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


async def test_of_two_patches_at_once_one_is_refused(kit: Any) -> None:
    model, old = kit.pair()
    one, other = changed(kit.build(), 0.1), changed(kit.build(), 0.1, seed=1)
    async with kit.running(model) as engine:
        results = await asyncio.gather(
            engine.patch(patch_between(old, one), 1), engine.patch(patch_between(old, other), 2), return_exceptions=True
        )
        assert [type(result) for result in results].count(WeightsError) == 1
        whole = one if engine.version == 1 else other
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
