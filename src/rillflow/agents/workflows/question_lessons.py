"""Lessons for the workflow `question`, and prompts to go on with, from any source whose right answers are known.

Invariant: every question is in exactly one split, whichever entry of the source asks it, and once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xxhash import xxh3_64_intdigest

from rillflow.agents.rewards.answers import golds
from rillflow.config import SourceConfig
from rillflow.dataflow.sources import open_source

SPLITS = ("train", "heldout")
_HELD_OUT = 4  # one question in so many


def prompts(split: str, **source: Any) -> Iterator[dict[str, Any]]:
    """The questions of a source (`data.prompts`, in a recipe's words) that are of this split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    opened = open_source(SourceConfig.model_validate(source), seed=0, shuffle=False)
    seen: set[int] = set()
    for index in range(opened.length):
        prompt = opened.at(index)
        digest = xxh3_64_intdigest(prompt.payload["question"].encode())
        if digest not in seen and (digest % _HELD_OUT == 0) == (split == "heldout"):
            yield {"id": prompt.id, "payload": prompt.payload}
        seen.add(digest)


def demonstrations(split: str, key: str | None = None, **source: Any) -> Iterator[dict[str, Any]]:
    """Of sft: each question with its right answer."""
    for prompt in prompts(split, **source):
        payload = prompt["payload"]
        messages = [
            {"role": "user", "content": payload["question"]},
            {"role": "assistant", "content": golds(payload, key)[0]},
        ]
        yield {"id": prompt["id"], "payload": {"messages": messages}}
