"""The engine's log-prob of a token equals that of a plain forward of the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from drawn_from import GRID, drawn_from
from rillflow.config import PolicyConfig
from rillflow.engine.build import build_engine
from rillflow.engine.embedded import EmbeddedEngine, core
from rillflow.errors import ConfigError, EngineError

FAMILIES = ["qwen3", "qwen2", "llama", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_ragged_batch_equals_plain_forward(kit: Any, family: str) -> None:
    model, reference = kit.pair(family)
    prompts = [kit.prompt(3 + 5 * index, seed=index) for index in range(12)]
    async with kit.running(model, slots=5) as engine:
        answers = await asyncio.gather(
            *[kit.ask(engine, tokens, max_tokens=4 + 3 * i, seed=i) for i, tokens in enumerate(prompts)]
        )
    for index, answer in enumerate(answers):
        assert len(answer.tokens) == 4 + 3 * index
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)
        assert answer.logprobs == answer.raw_logprobs


@pytest.mark.parametrize(
    "family",
    [
        "mistral window", "mixtral window", "phi3 window", "starcoder2 window", "qwen3 window", "gemma2", "gemma3",
        "gpt-oss",
    ],
)  # fmt: skip
async def test_a_sliding_window_is_that_of_the_plain_forward(kit: Any, family: str) -> None:
    """In prompts that are longer than it, in answers that grow longer, and behind prefixes that are reused."""
    model, reference = kit.pair(family)
    shared = kit.prompt(30)
    async with kit.running(model, slots=3) as engine:
        first = await kit.ask(engine, shared, max_tokens=20, seed=1)
        prompts = [shared, kit.prompt(3), first.prompt + first.tokens + kit.prompt(6, seed=9), [*shared, 5]]
        answers = await asyncio.gather(*[kit.ask(engine, t, max_tokens=20, seed=2) for t in prompts])
    for answer in (first, *answers):
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


def test_attention_that_we_do_not_compute_is_refused_at_the_start(kit: Any) -> None:
    torch.manual_seed(0)
    distant = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(EngineError, match="the embedded engine cannot run BloomForCausalLM"):
        EmbeddedEngine(distant, slots=2, context=64)
    policy = PolicyConfig(model="tiny", engine={"slots": 2, "context": 1 << 20, "device": "cpu"})
    with pytest.raises(ConfigError, match="tiny: context 1048576 is longer"):  # not one to start again after
        build_engine(policy, exact=False)
    mixed = kit.build("qwen3")
    mixed.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(EngineError, match="layers of kind chunked_attention"):
        EmbeddedEngine(mixed, slots=2, context=64)


def test_a_window_under_another_name_is_refused_beyond_its_length() -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=97, max_position_embeddings=256, window_size=24, **sizes)).eval()
    with pytest.raises(EngineError, match=r"GPTNeoConfig with 128 tokens: .* \(window_size 24\)"):
        EmbeddedEngine(model, slots=2, context=128)


async def test_a_rotary_embedding_that_depends_on_the_length_is_run_up_to_that_length_and_refused_beyond(
    kit: Any,
) -> None:
    model, reference = kit.pair("phi3 long")
    async with kit.running(model, context=64) as engine:
        answer = await kit.ask(engine, kit.prompt(30), max_tokens=30, seed=1)
    assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)
    with pytest.raises(EngineError, match=r"beyond 64 .* \(longrope\) is another one") as refused:
        EmbeddedEngine(kit.build("phi3 long"), slots=2, context=65)
    assert refused.value.hint.startswith("set engine.context to 64 or less")


async def test_both_log_probs_are_exact_for_any_sampling(kit: Any) -> None:
    """The grid that real servers are held to, in one batch."""
    model, reference = kit.pair()
    async with kit.running(model, slots=len(GRID)) as engine:
        answers = await asyncio.gather(
            *[
                kit.ask(engine, kit.prompt(9), max_tokens=20, seed=n, temperature=t, top_p=p, top_k=k)
                for n, (t, p, k) in enumerate(GRID)
            ]
        )
    for answer, how in zip(answers, GRID, strict=True):
        ids = torch.tensor([answer.prompt + answer.tokens])
        with torch.no_grad():
            rows = reference(ids).logits[0, len(answer.prompt) - 1 : -1]
        drawn = drawn_from(rows, *how).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0].tolist()
        assert answer.logprobs == pytest.approx(drawn, abs=1e-4), how
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_generate(kit: Any, family: str) -> None:
    model, reference = kit.pair(family)
    prompts = [kit.prompt(9 + index, seed=index) for index in range(4)]
    async with kit.running(model) as engine:
        answers = await asyncio.gather(*[kit.ask(engine, tokens, max_tokens=20, temperature=0.0) for tokens in prompts])
    for answer in answers:
        ids = torch.tensor([answer.prompt])
        made = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert answer.tokens == made[0, len(answer.prompt) :].tolist()
        assert answer.logprobs == [0.0] * 20
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_reused_prefixes_change_no_logprob(kit: Any, family: str) -> None:
    """Continued in place, copied from a running and from a finished sequence, and shared at arrival."""
    model, reference = kit.pair(family)
    shared = kit.prompt(24)
    async with kit.running(model, slots=4) as engine:
        first = await kit.ask(engine, shared, max_tokens=12, seed=1)
        turns = [first.prompt + first.tokens + kit.prompt(6, seed=9), [*shared, 5], [*shared, 6], shared, shared]
        answers = await asyncio.gather(*[kit.ask(engine, t, max_tokens=15, seed=2) for t in turns])
        assert engine.stats().reused_tokens > 5 * 20
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)
    assert answers[3].tokens == answers[4].tokens


async def test_a_long_prompt_is_computed_in_parts(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core._PREFILL_TOKENS, "cpu", 16)
    model, reference = kit.pair()
    async with kit.running(model) as engine:
        answers = await asyncio.gather(
            *[kit.ask(engine, kit.prompt(70 + i, seed=i), max_tokens=9, seed=3) for i in range(3)]
        )
    for answer in answers:
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so once
async def test_bfloat16_runs_and_stays_close(kit: Any) -> None:
    model, reference = kit.pair()
    async with kit.running(model.to(torch.bfloat16)) as engine:
        answer = await kit.ask(engine, kit.prompt(20), max_tokens=16, seed=1)
    assert answer.raw_logprobs == pytest.approx(kit.plain(reference.to(torch.bfloat16), answer), abs=0.3)


async def test_compaction_keeps_every_sequence_its_own(kit: Any) -> None:
    """Short and long answers interleave, so rows move down while they run."""
    model, reference = kit.pair()
    lengths = [40 if index % 4 == 3 else 3 + index % 5 for index in range(32)]
    async with kit.running(model, slots=16) as engine:
        answers = await asyncio.gather(
            *[kit.ask(engine, kit.prompt(6, seed=i), max_tokens=n, seed=i) for i, n in enumerate(lengths)]
        )
    for answer, length in zip(answers, lengths, strict=True):
        assert len(answer.tokens) == length
        assert answer.raw_logprobs == pytest.approx(kit.plain(reference, answer), abs=1e-5)
