"""The work of all pipelines of `bench.pipeline`: a small model that never samples a stop token, and answers whose
lengths are drawn from a long-tailed distribution, by prompt and place in the group: every pipeline gets the same ones.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rillflow.weights.model_folder import model_folder

CONTEXT = 1024
LONGEST = 900
# About log-normal, as lengths of reasoning and of agents' work are: a mean of 140 tokens, one in a hundred above 800.
_MEDIAN, _SPREAD = 85.0, 1.0
_END = "<|never|>"  # a token that the tokenizer knows and the model cannot sample


def make_model(folder: Path, seed: int = 0) -> Path:
    """A Qwen3 of 0.4 million fresh weights, with the tiny policy's tokenizer but for what ends an answer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tiny = model_folder("tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    known = len(tokenizer)
    tokenizer.add_special_tokens({"eos_token": _END})
    template = (tiny / "chat_template.jinja").read_text()
    plain, ends = (
        "{{- '<|im_end|>\\n' -}}\n{%- endfor -%}",
        f"'{_END}' if message.role == 'assistant' else '<|im_end|>'",
    )
    assert plain in template
    tokenizer.chat_template = template.replace(plain, f"{{{{- ({ends}) ~ '\\n' -}}}}\n{{%- endfor -%}}")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=known,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    shutil.rmtree(folder, ignore_errors=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def prompts(count: int, seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    for index in range(count):
        yield {"id": f"{split}-{seed}-{index}", "payload": {"question": f"Tell me about river number {index}."}}


def length(prompt: str, place: int) -> int:
    """Tokens of one answer."""
    draw = random.Random(f"{prompt}/{place}").gauss(0, 1)
    return min(LONGEST, max(4, round(_MEDIAN * math.exp(_SPREAD * draw))))


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """The share of vowels: it differs from answer to answer, so that every group has something to learn from."""
    text = answer or ""
    return sum(letter in "aeiou" for letter in text) / len(text) if text else 0.0


async def play(episode: Any) -> str | None:
    task = episode.task
    response = await episode.client.chat.completions.create(
        model=episode.model,
        messages=[{"role": "user", "content": episode.payload["question"]}],
        max_tokens=length(task.prompt.id, task.place),
    )
    content: str | None = response.choices[0].message.content
    return content
