"""The log-probs of the Engine contract, on a real server: both of every token are exact, however it is sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from contract_world import World, ask, check, logits, logprobs, prompt, request, tokens, untied, versions

from counting_engine import until
from drawn_from import GRID, Setting, drawn_from
from rillflow.errors import EngineError
from rillflow.types import Chunk

ROUNDING = 1e-4  # of a server's cumulative probabilities: a token at the edge of top_p may be in or out


def check_both(world: World, asked: list[int], chunks: list[Chunk], how: Setting) -> None:
    """Each token has the log-probs of the version that it claims: of what it was drawn from, and of the model's own."""
    answer, claimed = tokens(chunks), versions(chunks)
    picked = torch.tensor(answer)[:, None]
    temperature, top_p, top_k = how
    edges = [top_p] if top_p == 1.0 else [top_p, top_p - ROUNDING, top_p + ROUNDING]
    for version in set(claimed):
        mine = torch.tensor([other == version for other in claimed])
        rows = logits(world.models[version], asked, answer)
        drawn = [drawn_from(rows, temperature, edge, top_k) for edge in edges]
        for kind, wholes in (("logprobs", drawn), ("raw_logprobs", [rows.log_softmax(-1)])):
            found = torch.tensor(logprobs(chunks, kind), dtype=torch.float64)[mine]
            possible = torch.stack([whole.gather(-1, picked)[mine, 0] for whole in wholes])
            assert possible.isfinite().any(0).all(), f"{how}: nothing is drawn that was cut away"
            apart = (possible - found).abs().amin(0)
            assert apart.max() < 2e-4, f"{how}: {kind} of token {int(apart.argmax())}"


def named(how: Setting) -> dict[str, Any]:
    return dict(zip(("temperature", "top_p", "top_k"), how, strict=True))


async def test_logprobs_are_those_of_the_plain_forward(world: World) -> None:
    asked = prompt(30)
    chunks = await ask(world.engine, asked, max_tokens=60)
    assert (len(tokens(chunks)), chunks[-1].finish) == (60, "length")
    check(world, asked, chunks)
    assert logprobs(chunks) == logprobs(chunks, "raw_logprobs")
    assert tokens(await ask(world.engine, asked, max_tokens=60)) != tokens(chunks), "it draws"


@untied
@pytest.mark.parametrize("how", GRID)
async def test_both_log_probs_are_exact_for_any_sampling(world: World, how: Setting) -> None:
    asked = prompt(30)
    chunks = await ask(world.engine, asked, **named(how))
    assert len(tokens(chunks)) == 20
    check_both(world, asked, chunks, how)


@untied
async def test_both_log_probs_are_exact_among_requests_that_sample_otherwise(world: World) -> None:
    """In one step some rows need both log-probs and others do not, and some are greedy."""
    asked = [prompt(10 + place, seed=place) for place in range(len(GRID))]
    answers = await asyncio.gather(
        *(ask(world.engine, one, max_tokens=30, **named(how)) for one, how in zip(asked, GRID, strict=True))
    )
    for one, chunks, how in zip(asked, answers, GRID, strict=True):
        check_both(world, one, chunks, how)


@untied
@pytest.mark.parametrize("how", [(0.6, 1.0, 0), (1.3, 0.8, 20)])
async def test_a_tempered_or_cut_answer_is_streamed_and_goes_on_with_new_weights(world: World, how: Setting) -> None:
    asked = [prompt(20 + place, seed=place) for place in range(8)]
    streams = [world.engine.generate(request(one, max_tokens=160, **named(how))) for one in asked]
    firsts = await asyncio.gather(*(anext(stream) for stream in streams))
    before = world.engine.stats().generated_tokens
    await until(lambda: world.engine.stats().generated_tokens > before + 100, 60)
    await world.patch()
    answers = [[first, *[chunk async for chunk in stream]] for first, stream in zip(firsts, streams, strict=True)]
    assert any(len(set(versions(chunks))) == 2 for chunks in answers), "an answer goes on where it was cut"
    for one, chunks in zip(asked, answers, strict=True):
        assert len(tokens(chunks)) == 160
        check_both(world, one, chunks, how)


@untied
async def test_a_temperature_that_a_server_would_round_is_refused_by_name(world: World) -> None:
    with pytest.raises(EngineError, match=r"temperature 0\.005 is not supported"):
        await ask(world.engine, prompt(5), temperature=0.005)
