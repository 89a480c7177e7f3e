"""Prefixes are computed once and reused; exact mode reuses nothing and depends on no neighbour."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


async def test_a_groups_prompt_is_computed_once(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        await asyncio.gather(*[kit.ask(engine, kit.prompt(40), max_tokens=3, seed=i) for i in range(8)])
        stats = engine.stats()
    assert stats.prefilled_tokens == 40
    assert stats.reused_tokens == 7 * 39


async def test_what_groups_share_is_computed_once_and_so_is_the_rest_of_each(kit: Any) -> None:
    """A group's first sequence waits for the part that all share, and the others of the group for all of its prompt."""
    model, reference = kit.pair()
    prompts = [kit.prompt(20) + kit.prompt(15, seed=5 + group) for group in range(3)]
    async with kit.running(model, slots=12) as engine:
        asked = [kit.ask(engine, prompt, max_tokens=3, seed=i) for prompt in prompts for i in range(4)]
        answers = await asyncio.gather(*asked)
        stats = engine.stats()
    assert stats.prefilled_tokens == 35 + 2 * 15
    assert stats.reused_tokens == 3 * 34 + 2 * (20 + 3 * 34)
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


async def test_a_group_larger_than_the_slots_reuses_residents(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=3) as engine:
        await asyncio.gather(*[kit.ask(engine, kit.prompt(40), max_tokens=3, seed=i) for i in range(10)])
        stats = engine.stats()
    assert stats.prefilled_tokens == 40
    assert stats.reused_tokens == 9 * 39


async def test_the_next_turn_computes_only_what_is_new(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        first = await kit.ask(engine, kit.prompt(40), max_tokens=10, seed=1)
        await asyncio.gather(*[kit.ask(engine, kit.prompt(9, seed=5 + i), max_tokens=3) for i in range(4)])
        before = engine.stats()
        await kit.ask(engine, first.prompt + first.tokens + kit.prompt(6, seed=2), max_tokens=3)
        stats = engine.stats()
    assert stats.reused_tokens - before.reused_tokens == 49  # the last sampled token was never computed
    assert stats.prefilled_tokens - before.prefilled_tokens == 7


async def test_the_least_recently_used_sequence_makes_room(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model, slots=2) as engine:
        for seed in (1, 2, 1, 3):  # the third keeps the first fresh, so the fourth evicts the second
            await kit.ask(engine, kit.prompt(30, seed=seed), max_tokens=2)
        before = engine.stats().reused_tokens
        await kit.ask(engine, kit.prompt(30, seed=1), max_tokens=2)
        assert engine.stats().reused_tokens - before == 29
        await kit.ask(engine, kit.prompt(30, seed=2), max_tokens=2)
        assert engine.stats().reused_tokens - before == 29


async def test_followers_survive_the_death_of_their_leader(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rillflow.engine.embedded import core

    monkeypatch.setitem(core._PREFILL_TOKENS, "cpu", 8)  # the leader needs many steps for its prompt
    model, reference = kit.pair()
    async with kit.running(model) as engine:
        leader = engine.generate(kit.request(kit.prompt(60), max_tokens=5))
        followers = [asyncio.create_task(kit.ask(engine, kit.prompt(60), max_tokens=9, seed=i)) for i in range(3)]
        await kit.until(lambda: engine.stats().prefilled_tokens >= 16)
        await leader.aclose()
        answers = await asyncio.wait_for(asyncio.gather(*followers), 20)
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


async def test_followers_survive_the_death_of_a_leader_that_follows(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rillflow.engine.embedded import core

    monkeypatch.setitem(core._PREFILL_TOKENS, "cpu", 8)
    model, reference = kit.pair()
    longer = kit.prompt(60) + kit.prompt(9, seed=4)
    async with kit.running(model) as engine:
        first = asyncio.create_task(kit.ask(engine, kit.prompt(60), max_tokens=5))
        await kit.until(lambda: engine.stats().prefilled_tokens >= 8)
        between = engine.generate(kit.request(longer, max_tokens=5))
        others = [asyncio.create_task(kit.ask(engine, longer, max_tokens=9, seed=i)) for i in range(3)]
        await kit.until(lambda: engine.stats().prefilled_tokens >= 16)
        await between.aclose()
        answers = await asyncio.wait_for(asyncio.gather(first, *others), 20)
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_exact_mode_depends_on_no_neighbour(kit: Any, family: str) -> None:
    model, reference = kit.pair(family)
    tokens = kit.prompt(17)
    async with kit.running(model, exact=True) as engine:
        alone = await kit.ask(engine, tokens, max_tokens=25, seed=7)
        others = [kit.ask(engine, kit.prompt(9 + i, seed=i), max_tokens=9 + i, seed=i) for i in range(10)]
        twin = kit.ask(engine, [*tokens, 1, 2], max_tokens=12, seed=1)
        *_, crowded = await asyncio.gather(*others, twin, kit.ask(engine, tokens, max_tokens=25, seed=7))
        assert engine.stats().reused_tokens == 0
    assert crowded == alone  # bit for bit, log-probs included
    assert alone.raw_logprobs == pytest.approx(kit.plain(reference, alone), abs=1e-5)


async def test_exact_mode_takes_new_weights_in_flight(kit: Any) -> None:
    model, old = kit.pair()
    new = kit.build(seed=1)
    async with kit.running(model, exact=True) as engine:
        task = asyncio.create_task(kit.ask(engine, kit.prompt(17), max_tokens=25, seed=7))
        await kit.until(lambda: engine.stats().generated_tokens > 8)
        await engine.load(dict(new.state_dict()), 1)
        answer = await task
    by_version = {0: kit.plain(old, answer), 1: kit.plain(new, answer)}
    expected = [by_version[version][at] for at, version in enumerate(answer.versions)]
    assert set(answer.versions) == {0, 1}
    assert answer.raw_logprobs == pytest.approx(expected, abs=1e-5)
