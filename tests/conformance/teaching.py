"""A tiny policy that has learnt a conversation by heart: a real model for agents whose tools it never saw.

The shipped policy is fitted, for some seconds, to the answers of a few conversations as the chat template writes them.
It is then sampled like any other: nothing tells the engine what to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rillflow.weights.models import load_policy_model, pick_device
from tiny_policy import tiny_tokenizer

STEPS = 400
RATE = 2e-3
KNOWN = 0.2  # an answer is known when no token of it is less likely than exp(-0.2) = 0.82


class Lesson(NamedTuple):
    """A conversation; its assistant's messages are learnt."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def taught(lessons: Sequence[Lesson]) -> PreTrainedModel:
    """The tiny policy, fitted until it knows the lessons: sampled greedily, it says them."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = load_policy_model("tiny", "fp32", pick_device("cpu"))
    batch = [_labelled(tokenizer, lesson) for lesson in lessons]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        surprise_T = torch.cat([_surprise(model, ids_T, labels_T) for ids_T, labels_T in batch])
        if surprise_T.max() < KNOWN:
            return model.requires_grad_(False)
        optimizer.zero_grad()
        surprise_T.mean().backward()
        optimizer.step()
    raise AssertionError(f"not learnt in {STEPS} steps: the likeliest mistake is at {surprise_T.max():.3f}")


def _surprise(model: PreTrainedModel, ids_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """The negative log-prob of every token of the answers."""
    wanted_T = labels_T[1:]
    logits_TV = model(input_ids=ids_T[None]).logits[0, :-1]
    return cross_entropy(logits_TV[wanted_T >= 0], wanted_T[wanted_T >= 0], reduction="none")


def _labelled(tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the whole conversation, and the same with everything but the answers left out (-100)."""
    ids: list[int] = []
    labels: list[int] = []
    edges = [0]
    for place, message in enumerate(lesson.messages):
        if message["role"] == "assistant":
            edges += [_length(tokenizer, lesson, place, True), _length(tokenizer, lesson, place + 1, False)]
    text = _text(tokenizer, lesson, len(lesson.messages), False)
    for number, (start, end) in enumerate(pairwise(edges)):
        part = tokenizer.encode(text[start:end], add_special_tokens=False)
        ids += part
        labels += part if number % 2 else [-100] * len(part)
    return torch.tensor(ids), torch.tensor(labels)


def _length(tokenizer: PreTrainedTokenizerBase, lesson: Lesson, messages: int, prompt: bool) -> int:
    return len(_text(tokenizer, lesson, messages, prompt))


def _text(tokenizer: PreTrainedTokenizerBase, lesson: Lesson, messages: int, prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            lesson.messages[:messages], tools=lesson.tools, tokenize=False, add_generation_prompt=prompt
        )
    )
