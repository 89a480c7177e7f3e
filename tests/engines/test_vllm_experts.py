"""A mixture of experts on a real vLLM: its weights changed in place, and on a GPU its recorded choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch
from contract_world import ASKED
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.experts import Recorder, unpack
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import model_facts
from rillflow.types import GenerateRequest, Probe, Sampling
from rillflow.weights.probe import FP32

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

RECORDS = torch.cuda.is_available()  # vLLM's CPU build does not return experts
COMMON = list(range(3, 160))  # more than a block of the prefix cache


class World(NamedTuple):
    engine: VllmEngine
    model: Any
    recorder: Recorder


def build() -> Any:
    """A mixture whose first layer has no experts."""
    config = Qwen3MoeConfig(
        vocab_size=734, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, mlp_only_layers=[0], initializer_range=0.2, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("mixture")
    model = build()
    model.save_pretrained(folder / "model")
    settings = EngineConfig(kind="vllm", slots=8, context=320, server=ServerConfig(python=vllm_python, memory=0.2))
    engine = VllmEngine(model_facts(str(folder / "model"), "fp32"), settings, logs=folder, record=RECORDS)
    await engine.start()
    yield World(engine, model, Recorder(model))
    await engine.close()


@torch.no_grad()
def probe_of(model: Any) -> Probe:
    ids_RT = torch.tensor(ASKED)
    logprob_RTV = model(ids_RT).logits[:, :-1].log_softmax(-1)
    logprobs = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return Probe(prompts=ASKED, logprobs=logprobs, tolerance=FP32)


async def ask(engine: VllmEngine, prompt: list[int]) -> tuple[list[int], list[float], bytes]:
    request = GenerateRequest(id="r", tokens=prompt, sampling=Sampling(max_tokens=20))
    chunks = [chunk async for chunk in engine.generate(request)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return tokens, [value for chunk in chunks for value in chunk.raw_logprobs], chunks[-1].experts


@torch.no_grad()
async def check(world: World, prompt: list[int]) -> None:
    """Compare an answer's experts and log-probs with those of the model's own forward pass."""
    tokens, logprobs, experts = await ask(world.engine, prompt)
    whole = [*prompt, *tokens]
    logits_TV = world.model(input_ids=torch.tensor([whole[:-1]]), use_cache=False).logits[0]
    if RECORDS:
        chosen_NW, own_NW = unpack(experts), world.recorder.last()
        assert chosen_NW.shape == own_NW.shape == (len(whole) - 1, 4)
        # The chosen experts of a layer may come in any order; rounding may exchange two that are equally good.
        same_NL2 = np.sort(chosen_NW.reshape(-1, 2, 2)) == np.sort(own_NW.reshape(-1, 2, 2))
        assert same_NL2.mean() > 0.99
    expected_T = logits_TV.log_softmax(-1)[len(prompt) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert logprobs == pytest.approx(expected_T.tolist(), abs=5e-3)


async def test_answers_have_the_models_own_log_probs_and_experts(world: World) -> None:
    await asyncio.gather(*(check(world, [*range(4, 4 + size)]) for size in (1, 5, 33)))


async def test_a_cached_prompt_changes_neither(world: World) -> None:
    for last in (1, 2):
        await check(world, [*COMMON, last])
    assert world.engine.reused > 0


async def test_the_weights_of_experts_are_changed_in_place(world: World) -> None:
    with torch.no_grad():
        for parameter in world.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    await world.engine.load(world.model.state_dict(), 1, probe_of(world.model))
    await check(world, [5, 6, 7])
