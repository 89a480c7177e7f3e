"""Small random models with weights large enough that attention and every token matter, and a way to collect answers."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from rillflow.engine.embedded import EmbeddedEngine
from rillflow.types import Chunk, GenerateRequest, Sampling

VOCABULARY = 97

_MIXED = ["sliding_attention", "full_attention"]
_FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **size: Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=True, **size)),
    "qwen2": lambda **size: Qwen2ForCausalLM(Qwen2Config(**size)),
    "llama": lambda **size: LlamaForCausalLM(LlamaConfig(**size)),
    # Not known to the lean forward: runs through the library's own.
    "mistral": lambda **size: MistralForCausalLM(MistralConfig(sliding_window=None, **size)),
    # Their layers see the latest 12 tokens only.
    "mistral window": lambda **size: MistralForCausalLM(MistralConfig(sliding_window=12, **size)),
    "mixtral window": lambda **size: MixtralForCausalLM(MixtralConfig(sliding_window=12, num_local_experts=4, **size)),
    "phi3 window": lambda **size: Phi3ForCausalLM(Phi3Config(sliding_window=12, pad_token_id=0, **size)),
    # Layers with a window and others, capped scores, and attention sinks.
    "qwen3 window": lambda **size: Qwen3ForCausalLM(
        Qwen3Config(head_dim=16, use_sliding_window=True, sliding_window=12, layer_types=_MIXED, **size)
    ),
    "gemma2": lambda **size: Gemma2ForCausalLM(
        Gemma2Config(head_dim=8, sliding_window=12, attn_logit_softcapping=2.0, **size)
    ),
    "gemma3": lambda **size: Gemma3ForCausalLM(
        Gemma3TextConfig(head_dim=8, sliding_window=12, layer_types=_MIXED, **size)
    ),
    "gpt-oss": lambda **size: GptOssForCausalLM(
        GptOssConfig(
            head_dim=8,
            sliding_window=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            **size,
        )
    ),
    # Its rotary embedding is another one for sequences of more than 64 tokens.
    "phi3 long": lambda **size: Phi3ForCausalLM(
        Phi3Config(
            pad_token_id=0,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "rope_theta": 10_000.0,
            },
            **size,
        )
    ),
    "starcoder2 window": lambda **size: Starcoder2ForCausalLM(Starcoder2Config(sliding_window=12, **size)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(family: str = "qwen3", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = _FAMILIES[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return build


@dataclass
class Answer:
    """All chunks of one request, joined."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.raw_logprobs += chunk.raw_logprobs
        self.versions += [chunk.version] * len(chunk.tokens)
        self.finish = chunk.finish


def request(tokens: list[int], name: str = "r", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id=name, tokens=tokens, sampling=Sampling(**sampling))


async def ask(engine: EmbeddedEngine, tokens: list[int], **sampling: Any) -> Answer:
    answer = Answer(tokens)
    async for chunk in engine.generate(request(tokens, **sampling)):
        answer.add(chunk)
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Let the engine run until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is a count, not an event
            await asyncio.sleep(0)


@asynccontextmanager
async def running(model: Any, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, **({"slots": 8, "context": 128} | settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@torch.no_grad()
def plain_logprobs(model: Any, answer: Answer) -> list[float]:
    """Return the log-probs of the answer's tokens by one plain forward over the whole sequence.

    Tests compare to 1e-5: the kernels add the same fp32 products in another order than the machine's BLAS, with or
    without fused multiply-add, and log-probs of a few units then differ by about 1e-6.
    """
    ids = torch.tensor([answer.prompt + answer.tokens])
    all_TV = model(ids).logits[0].float().log_softmax(-1)
    start = len(answer.prompt) - 1
    return [float(all_TV[start + index, token]) for index, token in enumerate(answer.tokens)]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Kit:
    """The helpers of this folder's tests, as one fixture."""

    build: Callable[..., Any] = build
    ask: Callable[..., Awaitable[Answer]] = ask
    until: Callable[..., Awaitable[None]] = until
    running: Callable[..., Any] = running
    request: Callable[..., GenerateRequest] = request
    prompt: Callable[..., list[int]] = prompt
    plain: Callable[..., list[float]] = plain_logprobs

    @staticmethod
    def pair(family: str = "qwen3", seed: int = 0) -> tuple[Any, Any]:
        """A model for the engine, which takes it over, and an untouched copy to compare with."""
        model = build(family, seed)
        return model, copy.deepcopy(model)


@pytest.fixture
def kit() -> Kit:
    return Kit()
