"""Whatever is asked, cut and loaded in whatever order, every log-prob is that of a plain forward of its version."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ASK, CUT, LOAD, WAIT, PAUSE = range(5)
# Kind, then numbers that choose: a stem, how much of it, how many tokens of its own, how many to sample.
MOVE = st.tuples(
    st.sampled_from([ASK, ASK, ASK, CUT, LOAD, WAIT, PAUSE]),
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(1, 10),
)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(moves=st.lists(MOVE, min_size=2, max_size=14), slots=st.integers(1, 4))
def test_no_interleaving_changes_a_logprob(kit: Any, family: str, moves: list[Any], slots: int) -> None:
    models = [kit.build(family, seed=seed) for seed in (0, 1)]
    answers = asyncio.run(_played(kit, copy.deepcopy(models[0]), models, moves, slots))
    for answer in answers:
        assert len(answer.tokens) == len(answer.raw_logprobs) == len(answer.versions)
        assert answer.versions == sorted(answer.versions)
        for version in set(answer.versions):
            plain = kit.plain(models[version % 2], answer)
            for said, expected, by in zip(answer.raw_logprobs, plain, answer.versions, strict=True):
                assert by != version or said == pytest.approx(expected, abs=1e-5)


async def _played(kit: Any, model: Any, models: list[Any], moves: list[Any], slots: int) -> list[Any]:
    stems = [kit.prompt(40, seed=seed) for seed in range(3)]
    cut: list[Any] = []
    async with asyncio.timeout(60), kit.running(model, slots=slots, context=96) as engine:
        engine._core._budget = 16  # prompts are computed in parts, so that a cut or a load can come between
        asked: list[asyncio.Task[Any]] = []
        for place, (kind, stem, shared, own, count) in enumerate(moves):
            tokens = stems[stem][:shared] + kit.prompt(own, seed=100 + place)
            if kind == ASK:
                asked.append(asyncio.create_task(kit.ask(engine, tokens, max_tokens=count, seed=place)))
            elif kind == CUT:
                cut.append(engine.generate(kit.request(tokens, max_tokens=60)))
                if len(cut) > 1:  # waiting, being computed or sampling: whatever it has come to
                    await cut.pop(0).aclose()
            elif kind == LOAD:
                version = engine.version + 1
                await engine.load(models[version % 2].state_dict(), version)
            elif kind == PAUSE:
                await engine.pause()
                await engine.resume()
            for _ in range(count if kind == WAIT else 1):
                await asyncio.sleep(0)
        answers = list(await asyncio.gather(*asked))
        for stream in cut:
            await stream.aclose()
        return answers


async def test_a_prompt_of_one_token(kit: Any) -> None:
    model, plain = kit.pair()
    async with asyncio.timeout(60), kit.running(model) as engine:
        neighbour = asyncio.create_task(kit.ask(engine, kit.prompt(9), max_tokens=4))
        answer = await kit.ask(engine, [5], max_tokens=4)
        assert len((await neighbour).tokens) == 4
    assert answer.raw_logprobs == pytest.approx(kit.plain(plain, answer), abs=1e-5)


async def test_a_request_that_cannot_be_seated_is_answered(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(60), kit.running(kit.build()) as engine:
        monkeypatch.setattr(engine._core, "_choose", lambda best: 1 // 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await kit.ask(engine, kit.prompt(9), max_tokens=4)
