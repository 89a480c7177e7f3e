"""The embedded engine serves weights only after they have reproduced the probe that came with them."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from rillflow.contracts import UNKNOWN, Change, Patch
from rillflow.types import Probe
from rillflow.weights.probe import FP32, ProbeMismatch, prompts

ASKED = prompts(97, 128)


@torch.no_grad()
def plain(model: Any) -> list[list[float]]:
    ids_RT = torch.tensor(ASKED)
    logprob_RTV = model(ids_RT).logits[:, :-1].float().log_softmax(-1)
    values: list[list[float]] = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return values


def probe_of(model: Any) -> Probe:
    return Probe(prompts=ASKED, logprobs=plain(model), tolerance=FP32)


def moved(model: Any, seed: int = 1) -> Any:
    """Another version of the model."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


async def is_silent(kit: Any, engine: Any) -> asyncio.Task[Any]:
    """A request that waits, whatever time it is given."""
    asked = asyncio.create_task(kit.ask(engine, kit.prompt(9), max_tokens=5, seed=1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not asked.done()
    assert engine.stats().generated_tokens == 0
    return asked


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", "llama", "mistral", "mistral window", "mixtral window", "gemma2", "gpt-oss"]
)
@pytest.mark.parametrize("exact", [False, True])
async def test_scores_are_those_of_a_plain_forward(kit: Any, family: str, exact: bool) -> None:
    model, other = kit.pair(family)
    async with kit.running(model, exact=exact) as engine:
        await engine.load(other.state_dict(), 1)
        for got, expected in zip(engine._core.scores(ASKED), plain(other), strict=True):
            assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("on_update", ["refill", "keep"])
async def test_a_proof_disturbs_no_answer(kit: Any, on_update: str) -> None:
    """All slots are taken: their caches must not be overwritten."""
    model, other = kit.pair()
    async with kit.running(model, slots=2, on_update=on_update) as engine:
        tasks = [asyncio.create_task(kit.ask(engine, kit.prompt(40, n), max_tokens=60, seed=n)) for n in range(2)]
        await kit.until(lambda: engine.stats().generated_tokens > 20)
        await engine.prove(probe_of(other))
        for task in tasks:
            answer = await task
            assert answer.raw_logprobs == pytest.approx(kit.plain(other, answer), abs=1e-5)


async def test_an_engine_in_doubt_samples_nothing_before_its_weights_are_proven(kit: Any) -> None:
    model, other = kit.pair()
    async with kit.running(model) as engine:
        engine.doubt()
        assert not engine.proven
        asked = await is_silent(kit, engine)
        await engine.prove(probe_of(other))
        assert engine.proven
        assert (await asked).versions == [0] * 5


async def test_a_version_without_a_probe_is_taken_as_it_is(kit: Any) -> None:
    async with kit.running(kit.build()) as engine:
        engine.doubt()
        await engine.prove(None)
        assert (await kit.ask(engine, kit.prompt(9), max_tokens=5)).versions == [0] * 5


async def test_the_weights_that_an_engine_started_with_must_prove_right(kit: Any) -> None:
    async with kit.running(kit.build(seed=1)) as engine:
        engine.doubt()
        with pytest.raises(ProbeMismatch, match="version 0 is not served, wrong weights"):
            await engine.prove(probe_of(kit.build(seed=2)))
        assert engine.version == UNKNOWN
        await is_silent(kit, engine)


async def test_whole_weights_and_patches_serve_once_they_prove_right(kit: Any) -> None:
    model, old = kit.pair()
    new = moved(old)
    async with kit.running(model) as engine:
        await engine.load(new.state_dict(), 1, probe_of(new))
        changes = {name: Change(None, tensor.view(-1)) for name, tensor in old.state_dict().items()}
        await engine.patch(Patch(1, changes, {}), 2, probe_of(old))
        answer = await kit.ask(engine, kit.prompt(9), max_tokens=5)
        assert answer.versions == [2] * 5
        assert answer.raw_logprobs == pytest.approx(kit.plain(old, answer), abs=1e-5)


def stale_tensor(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return new | {"model.layers.1.mlp.down_proj.weight": old["model.layers.1.mlp.down_proj.weight"]}


def swapped(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    return new | {first: new[second], second: new[first]}


def all_stale(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return old


@pytest.mark.parametrize("spoil", [stale_tensor, swapped, all_stale])
@pytest.mark.parametrize("way", ["load", "patch"])
async def test_wrong_weights_are_caught_before_a_token_is_sampled(kit: Any, spoil: Any, way: str) -> None:
    """The bytes arrive, and are not those whose log-probs the trainer has published."""
    model, old = kit.pair()
    new = moved(old)
    wrong = spoil(old.state_dict(), new.state_dict())
    async with kit.running(model) as engine:
        changes = {name: Change(None, tensor.reshape(-1)) for name, tensor in wrong.items()}
        given = wrong if way == "load" else Patch(0, changes, {})
        with pytest.raises(ProbeMismatch):
            await getattr(engine, way)(given, 1, probe_of(new))
        assert engine.version == UNKNOWN
        assert not engine.proven
        asked = await is_silent(kit, engine)
        await engine.load(new.state_dict(), 1, probe_of(new))
        assert (await asked).versions == [1] * 5


async def test_what_is_derived_from_the_weights_must_be_new_too(kit: Any) -> None:
    """The norms of Qwen3's heads are laid side by side after each update: here they are not."""
    model, old = kit.pair("qwen3")
    new = copy.deepcopy(old)
    with torch.no_grad():
        for layer in new.model.layers:
            layer.self_attn.q_norm.weight.mul_(torch.linspace(0.2, 3.0, 16))
    async with kit.running(model) as engine:
        refresh, engine._core._forward.refresh = engine._core._forward.refresh, lambda: None
        with pytest.raises(ProbeMismatch):
            await engine.load(new.state_dict(), 1, probe_of(new))
        engine._core._forward.refresh = refresh
        await engine.load(new.state_dict(), 1, probe_of(new))
        assert (await kit.ask(engine, kit.prompt(9), max_tokens=5)).versions == [1] * 5
