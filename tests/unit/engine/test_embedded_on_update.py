"""New weights with `on_update="keep"`: running answers keep their attention cache, new ones never see it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rillflow.types import Chunk


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


async def begun(kit: Any, engine: Any, tokens: list[int], **sampling: Any) -> tuple[asyncio.Task[Any], int]:
    """A running answer, and how many of its tokens the engine has drawn."""
    task = asyncio.create_task(kit.ask(engine, tokens, **sampling))
    before = engine.stats().generated_tokens
    await kit.until(lambda: engine.stats().generated_tokens >= before + 10)
    await engine.pause()
    return task, engine.stats().generated_tokens - before


@torch.no_grad()
def mixed_logprobs(old: Any, new: Any, answer: Any, switched: int) -> list[float]:
    """Return the result of a plain forward that keeps the old model's cache for the first `switched` tokens."""
    ids = torch.tensor([answer.prompt + answer.tokens])
    cached = old(ids[:, :switched], use_cache=True)
    later = new(ids[:, switched:], past_key_values=cached.past_key_values, use_cache=True)
    all_TV = torch.cat((cached.logits, later.logits), 1)[0].float().log_softmax(-1)
    start = len(answer.prompt) - 1
    return [float(all_TV[start + at, token]) for at, token in enumerate(answer.tokens)]


async def test_keep_prefills_nothing_again_and_every_token_has_its_version(kit: Any) -> None:
    model, old = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model, on_update="keep") as engine:
        task, drawn = await begun(kit, engine, kit.prompt(20), max_tokens=40, seed=1)
        prefilled = engine.stats().prefilled_tokens
        await engine.load(weights(new), 7)
        await engine.resume()
        answer = await task
        assert engine.stats().prefilled_tokens == prefilled == 20
    assert answer.versions == [0] * drawn + [7] * (40 - drawn)
    # The last token drawn by the old weights was not in the cache yet: the new ones compute it.
    expected = mixed_logprobs(old, new, answer, 20 + drawn - 1)
    assert answer.raw_logprobs == pytest.approx(expected, abs=1e-5)


async def test_refill_computes_running_answers_again(kit: Any) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model, on_update="refill") as engine:
        task, drawn = await begun(kit, engine, kit.prompt(20), max_tokens=40, seed=1)
        await engine.load(weights(new), 7)
        await engine.resume()
        answer = await task
        assert engine.stats().prefilled_tokens == 20 + 20 + drawn
    assert answer.raw_logprobs[drawn:] == pytest.approx(kit.plain(new, answer)[drawn:], abs=1e-5)


async def test_a_new_request_never_takes_over_what_older_weights_computed(kit: Any) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    shared = kit.prompt(30)
    async with kit.running(model, on_update="keep") as engine:
        await kit.ask(engine, [*shared, 3], max_tokens=3, seed=3)  # a resident
        task, _ = await begun(kit, engine, shared, max_tokens=60, seed=1)
        reused = engine.stats().reused_tokens
        await engine.load(weights(new), 1)
        await engine.resume()
        during = await kit.ask(engine, [*shared, 4], max_tokens=5, seed=2)
        assert engine.stats().reused_tokens == reused
        await task
        # The answer's slot holds old and new keys: no other request may use it as a prefix.
        after = await kit.ask(engine, [*task.result().prompt, *task.result().tokens], max_tokens=5, seed=2)
        again = await kit.ask(engine, [*shared, 4], max_tokens=5, seed=2)
        assert engine.stats().reused_tokens > reused, "what the new weights computed is reused"
    assert set(during.versions) == set(after.versions) == {1}
    for answer in (during, after, again):
        assert answer.raw_logprobs == pytest.approx(kit.plain(new, answer), abs=1e-5)
    assert again.tokens == during.tokens


async def test_keep_many_updates_many_answers(kit: Any) -> None:
    """Slots are swapped, freed and taken again while versions come; old caches never leak into new answers."""
    model, _ = kit.pair()
    models = {version: kit.build(seed=version) for version in range(1, 6)}
    async with kit.running(model, slots=4, on_update="keep") as engine:
        tasks = [
            asyncio.create_task(kit.ask(engine, kit.prompt(12, seed=i % 3), max_tokens=5 + 7 * i, seed=i))
            for i in range(9)
        ]
        for version, other in models.items():
            await kit.until(lambda version=version: engine.stats().generated_tokens >= 30 * version)
            await engine.load(weights(other), version)
        answers = await asyncio.gather(*tasks)
    one_version = [answer for answer in answers if len(set(answer.versions)) == 1 and answer.versions[0] > 0]
    assert one_version
    assert any(len(set(answer.versions)) > 1 for answer in answers)
    for answer in answers:
        assert answer.versions == sorted(answer.versions)
    for answer in one_version:
        assert answer.raw_logprobs == pytest.approx(kit.plain(models[answer.versions[0]], answer), abs=1e-5)


@pytest.mark.parametrize("on_update", ["refill", "keep"])
async def test_the_first_chunk_of_new_weights_says_that_there_is_a_seam(kit: Any, on_update: str) -> None:
    model, _ = kit.pair()
    new = kit.build(seed=1)
    chunks: list[Chunk] = []

    async def collect(engine: Any) -> None:
        async for chunk in engine.generate(kit.request(kit.prompt(9), max_tokens=30, seed=1)):
            chunks.append(chunk)

    async with kit.running(model, on_update=on_update) as engine:
        before = asyncio.create_task(collect(engine))
        await kit.until(lambda: engine.stats().generated_tokens > 5)
        await engine.load(weights(new), 1)
        await before
        with_seam = [chunk.version for chunk in chunks if chunk.seam == "weights"]
        assert with_seam == [1]
        assert [chunk.seam for chunk in chunks if chunk.version == 0] == [""] * sum(c.version == 0 for c in chunks)
        chunks.clear()
        await engine.pause()
        unbegun = asyncio.create_task(collect(engine))
        await asyncio.sleep(0)
        await engine.load(weights(new), 2)
        await engine.resume()
        await unbegun
    assert {chunk.seam for chunk in chunks} == {""}, "nothing was cut: it had not begun"


async def test_loads_without_a_pause_cannot_keep_answers_from_getting_on(kit: Any) -> None:
    """Six answers of 200 tokens: to compute them again takes more steps than there are between two loads."""
    model, _ = kit.pair()
    tensors = weights(kit.build(seed=1))
    async with kit.running(model, on_update="refill", slots=6, context=250) as engine:
        engine._core._budget = 64
        over = asyncio.Event()

        async def load_for_ever() -> None:
            version = 1
            while not over.is_set():
                await engine.load(tensors, version)
                version += 1
                await asyncio.sleep(0)

        loading = asyncio.create_task(load_for_ever())
        prompts = [kit.prompt(200, seed) for seed in range(6)]
        asked = asyncio.gather(*(kit.ask(engine, prompt, max_tokens=12, seed=n) for n, prompt in enumerate(prompts)))
        answers = await asyncio.wait_for(asked, 30)
        over.set()
        await loading
    assert [len(answer.tokens) for answer in answers] == [12] * 6
    assert all(answer.versions == sorted(answer.versions) for answer in answers)
