"""What both sides of `bench.endtoend` play: the model, the prompts, the rewards, and our workflow.

Nothing here needs more than torch and transformers: TRL's side runs in an environment of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

GROUP = 8
EQUAL = 32  # tokens of every answer, where lengths are equal
LONGEST = 256
# The lengths of answers to reasoning tasks are about log-normal; this one has a mean of 33 tokens.
_MEDIAN, _SPREAD = 20.0, 1.0
_TINY = Path(__file__).parents[1] / "src/rillflow/assets/tiny"
_TOPICS = ("rivers", "mills", "wheels", "boats", "fields", "roads", "birds", "bread")
_VOWELS = frozenset("aeiou")


def make_model(folder: Path, seed: int) -> Path:
    """A Qwen3 of 0.88 million fresh weights with the tiny policy's tokenizer. It samples a stop token about once in 700
    tokens, so that lengths are what the limits say."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(_TINY)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts(case: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Each says itself how long its answers may be."""
    draws = random.Random(f"endtoend/{case}/{seed}")
    for index in range(count):
        tail = _MEDIAN * math.exp(_SPREAD * draws.gauss(0, 1))
        limit = EQUAL if case == "equal" else min(LONGEST, max(4, round(tail)))
        question = f"Write {limit} words about {draws.choice(_TOPICS)}, number {index}."
        yield {"id": f"{case}-{seed}-{index}", "payload": {"question": question, "limit": limit}}


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """The share of vowels among the characters: dense, so that a fresh model can be seen to learn within minutes."""
    text = answer or ""
    return sum(letter in _VOWELS for letter in text) / len(text) if text else 0.0


async def play(episode: Any) -> str | None:
    messages = [{"role": "user", "content": episode.payload["question"]}]
    said = await episode.role("agent").ask(messages, max_tokens=episode.payload["limit"])
    return str(said.text)
