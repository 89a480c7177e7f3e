"""Lessons for the workflow `question`, from any source of prompts whose right answers are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rillflow.agents.rewards.answers import golds
from rillflow.config import SourceConfig
from rillflow.dataflow.sources import open_source


def demonstrations(key: str | None = None, **source: Any) -> Iterator[dict[str, Any]]:
    """Of sft: each question of the source (`data.prompts`, in a recipe's words) with its right answer."""
    prompts = open_source(SourceConfig.model_validate(source), seed=0, shuffle=False)
    for index in range(prompts.length):
        prompt = prompts.at(index)
        messages = [
            {"role": "user", "content": prompt.payload["question"]},
            {"role": "assistant", "content": golds(prompt.payload, key)[0]},
        ]
        yield {"id": prompt.id, "payload": {"messages": messages}}
