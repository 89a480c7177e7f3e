"""Grammars and seeds on a real vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import model_facts
from rillflow.gateway.grammars import of_choices, of_lark, of_schema
from rillflow.types import Chunk, GenerateRequest, Grammar, Sampling
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {"thought": {"type": "string", "maxLength": 20}, "tool": {"enum": ["search", "python"]}},
    "required": ["thought", "tool"],
}
JSON = of_schema(SCHEMA, "schema")
END = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[VllmEngine]:
    server = ServerConfig(python=vllm_python, seeded=True)
    settings = EngineConfig(kind="vllm", slots=8, context=256, device="cpu", server=server)
    logs: Path = tmp_path_factory.mktemp("logs")
    made = VllmEngine(model_facts("tiny", "fp32"), settings, logs=logs)
    await made.start()
    yield made
    await made.close()


def prompt() -> list[int]:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    return list(load_tokenizer("tiny").encode(text, add_special_tokens=False))


async def ask(engine: VllmEngine, grammar: Grammar | None, seed: int, count: int = 80) -> list[Chunk]:
    sampling = Sampling(max_tokens=count, stop_tokens=(END,), seed=seed, grammar=grammar)
    request = GenerateRequest(id=f"r{seed}", tokens=prompt(), sampling=sampling)
    return [chunk async for chunk in engine.generate(request)]


@torch.no_grad()
def plain(model: Any, tokens: list[int]) -> list[float]:
    before = prompt()
    all_TV = model(torch.tensor([before + tokens])).logits[0].float().log_softmax(-1)
    return [float(all_TV[len(before) - 1 + at, token]) for at, token in enumerate(tokens)]


async def test_answers_are_of_the_grammar_with_the_models_own_log_probs(engine: VllmEngine) -> None:
    tokenizer, model = load_tokenizer("tiny"), load_policy_model("tiny", "fp32", pick_device("cpu"))
    for answer in await asyncio.gather(*(ask(engine, JSON, seed) for seed in range(6))):
        (chunk,) = answer
        assert (chunk.finish, chunk.tokens[-1]) == ("stop", END)
        assert list(json.loads(tokenizer.decode(chunk.tokens[:-1]))) == ["thought", "tool"]
        assert chunk.raw_logprobs == pytest.approx(plain(model, chunk.tokens), abs=1e-3)
        assert 0.0 in chunk.logprobs
        assert min(chunk.logprobs) < 0.0
    for grammar, texts in ((of_choices(["yes", "no"], "c"), {"yes", "no"}), (of_lark('start: "a"', "g"), {"a"})):
        (chunk,) = await ask(engine, grammar, 1)
        assert tokenizer.decode(chunk.tokens[:-1]) in texts


async def test_the_same_seeds_give_the_same_answers(engine: VllmEngine) -> None:
    once = await asyncio.gather(*(ask(engine, None, seed, 20) for seed in range(4)))
    alone = [await ask(engine, None, seed, 20) for seed in range(4)]
    drawn, again = ([tuple(token for chunk in one for token in chunk.tokens) for one in many] for many in (once, alone))
    assert drawn == again  # however many of them came at once
    assert len(set(drawn)) > 1


async def test_an_answer_that_new_weights_cut_is_sampled_anew(engine: VllmEngine) -> None:
    model = load_policy_model("tiny", "fp32", pick_device("cpu"))
    long = of_schema({"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 60}, "schema")
    asked = [asyncio.create_task(ask(engine, long, seed, 120)) for seed in range(4)]
    await asyncio.sleep(0)
    await engine.load(dict(model.state_dict()), 1)
    for answer in await asyncio.gather(*asked):
        (chunk,) = answer
        assert (chunk.version, chunk.finish, len(chunk.tokens)) == (1, "length", 120)
        assert chunk.raw_logprobs == pytest.approx(plain(model, chunk.tokens), abs=1e-3)
