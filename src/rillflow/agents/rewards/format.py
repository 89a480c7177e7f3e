"""Whether an answer has the shape that it should have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from rillflow.agents.rewards.answers import text_of
from rillflow.agents.rewards.grading.pool import grade, prepare
from rillflow.agents.rewards.shipped import ShippedReward
from rillflow.config.base import Seconds

_MOST = 1 << 17  # characters; no longer answer has any shape


class Format(ShippedReward):
    """1 if the answer has the shape asked for, else 0: `pattern`, `tags` or `json_keys`."""

    pattern: str | None = Field(None, description="a regular expression that the whole answer matches")
    tags: list[str] | None = Field(
        None, min_length=1, description="<TAG>…</TAG> for each, once, in this order, and nothing but space between them"
    )
    json_keys: list[str] | None = Field(None, description="the answer is a JSON object that has these keys; may be []")
    seconds: Seconds = Field(
        5.0, description="of computing that matching `pattern` may take; beyond that there is no reward"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _one(self) -> Format:
        if sum(given is not None for given in (self.pattern, self.tags, self.json_keys)) != 1:
            raise ValueError("give exactly one of `pattern`, `tags` and `json_keys`")
        return self

    async def prepare(self) -> None:
        if self.pattern is not None:
            await prepare("pattern")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        said = text_of(answer).strip()
        if len(said) > _MOST:
            return 0.0
        if self.pattern is not None:
            return await grade("pattern", self.seconds, pattern=self.pattern, text=said)
        return float(_has_tags(said, self.tags) if self.tags is not None else _has_keys(said, self.json_keys or []))


def _has_tags(text: str, tags: list[str]) -> bool:
    """One after the other; no tag of them within another."""
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if not text.startswith(opened):
            return False
        held, found, text = text.removeprefix(opened).partition(closed)
        if not found or any(f"<{each}>" in held or f"</{each}>" in held for each in tags):
            return False
        text = text.lstrip()
    return not text


def _has_keys(text: str, keys: list[str]) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(key in found for key in keys)
