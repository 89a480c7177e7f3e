"""How tokens are drawn: seeds, distributions, cuts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rillflow.engine.embedded.sampling import Drawn, Settings, draw, uniforms


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> Settings:
    return Settings(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int64),
        np.full(rows, seed, np.uint64),
        np.arange(rows),
    )


def many(logits_V: torch.Tensor, rows: int = 20_000, **how: Any) -> Drawn:
    return draw(logits_V.expand(rows, -1), settings(rows, **how))


def expected(logits_V: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """The distribution by its definition, one token after the other."""
    probabilities = (logits_V.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    order = order[: top_k or None]
    total = sum(float(probabilities[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p * total:
            kept.append(token)
        mass += float(probabilities[token])
    out = torch.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
]


@pytest.mark.parametrize("how", CUTS)
def test_draws_follow_the_distribution(how: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    want = expected(logits, **how)
    drawn = many(logits, **how)
    counts = np.bincount(drawn.tokens, minlength=40)
    assert counts[(want == 0).numpy()].sum() == 0
    mean = want.numpy() * len(drawn.tokens)
    often = mean > 5
    chi_square = (((counts - mean) ** 2) / np.maximum(mean, 1e-9))[often].sum()
    assert chi_square < often.sum() + 5 * np.sqrt(2 * often.sum())


@pytest.mark.parametrize("how", CUTS)
def test_logprobs_are_of_the_distribution_drawn_from(how: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    drawn = many(logits, rows=500, **how)
    tokens = torch.from_numpy(drawn.tokens).long()
    assert drawn.logprobs == pytest.approx(expected(logits, **how).log()[tokens].numpy(), abs=1e-5)
    assert drawn.raw_logprobs == pytest.approx(logits.log_softmax(-1)[tokens].numpy(), abs=1e-5)


def test_mixed_rows_are_each_drawn_their_own_way() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)) * 2
    mixed = Settings(
        np.asarray([1.0, 0.0, 0.5, 1.0, 1.0, 0.0], np.float32),
        np.asarray([1.0, 1.0, 1.0, 0.5, 1.0, 0.5], np.float32),
        np.asarray([0, 0, 0, 0, 3, 3]),
        np.arange(6, dtype=np.uint64),
        np.arange(6),
    )
    together = draw(logits, mixed)
    for row in range(6):
        alone = draw(logits[row : row + 1], Settings(*(column[row : row + 1] for column in mixed)))
        assert [column[0] for column in alone] == [column[row] for column in together]
    assert together.tokens[1] == int(logits[1].argmax())
    assert together.logprobs[[1, 5]].tolist() == [0.0, 0.0]


def test_uniforms_are_uniform_and_independent_of_the_seeds_pattern() -> None:
    for seeds, positions in ((np.arange(50_000), np.zeros(50_000)), (np.zeros(50_000), np.arange(50_000))):
        values = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        assert values.min() > 0.0
        assert values.max() < 1.0
        counts = np.bincount((values * 100).astype(int), minlength=100)
        assert ((counts - 500) ** 2 / 500).sum() < 100 + 5 * np.sqrt(200)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


async def test_a_seed_gives_the_same_tokens_alone_and_among_neighbours(kit: Any) -> None:
    model, _ = kit.pair()
    tokens = kit.prompt(12)
    async with kit.running(model, slots=16) as engine:
        alone = await kit.ask(engine, tokens, max_tokens=20, seed=7)
        others = [kit.ask(engine, kit.prompt(5 + i, seed=i), max_tokens=5 + i, top_k=4) for i in range(10)]
        crowded, *_ = await asyncio.gather(kit.ask(engine, tokens, max_tokens=20, seed=7), *others)
        different = await kit.ask(engine, tokens, max_tokens=20, seed=8)
    assert crowded.tokens == alone.tokens
    assert crowded.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert different.tokens != alone.tokens


async def test_a_continued_request_goes_on_with_the_same_random_numbers(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        whole = await kit.ask(engine, kit.prompt(12), max_tokens=20, seed=7)
        rest = await kit.ask(engine, whole.prompt + whole.tokens[:8], max_tokens=12, seed=7)
    assert rest.tokens == whole.tokens[8:]


async def test_without_a_seed_answers_differ(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        answers = await asyncio.gather(*[kit.ask(engine, kit.prompt(12), max_tokens=20) for _ in range(4)])
    assert len({tuple(answer.tokens) for answer in answers}) == 4
    assert all(answer.finish == "length" for answer in answers)


async def test_seeds_of_any_size_are_taken(kit: Any) -> None:
    model, _ = kit.pair()
    async with kit.running(model) as engine:
        for seed in (-1, 2**64 - 1, 2**70 + 3):
            assert len((await kit.ask(engine, kit.prompt(4), max_tokens=3, seed=seed)).tokens) == 3
