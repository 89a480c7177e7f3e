"""Rewards of an answer's form: `format` and `length`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.agents.rewards.base import ShippedReward, text_of
from rillflow.agents.rewards.grading import grade, prepare
from rillflow.config.base import Positive, Seconds

_MOST = 1 << 17  # characters of an answer; a longer one has no form


class Format(ShippedReward):
    """1 if the answer has the wanted form, else 0: `pattern`, `tags` or `json_keys`."""

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
            raise ValueError(f"not a regular expression: {error}") from None
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


class Length(ShippedReward):
    """0 to -1: nothing up to `longest` - `margin`, then falling evenly to -1 at `longest` (DAPO's shape).

    It measures the text that the workflow returned. `trainer.overlong` does the same to all tokens of a sample.
    """

    longest: Positive = Field(description="an answer of this length, or longer, gets -1")
    margin: Positive = Field(description="how much below that the punishment begins")
    unit: Literal["words", "characters", "tokens"] = "words"
    model: str | None = Field(None, description="folder of the model whose tokens are counted, for unit tokens")

    @model_validator(mode="after")
    def _fits(self) -> Length:
        if self.margin > self.longest:
            raise ValueError("`margin` is more than `longest`: every answer would be punished")
        if (self.unit == "tokens") != (self.model is not None):
            raise ValueError("`model` goes with `unit: tokens`, which needs it")
        if self.model is not None and not (Path(self.model) / "tokenizer.json").is_file():
            raise ValueError(f"there is no tokenizer.json in {self.model}")
        return self

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        over = self._measure(text_of(answer)) - (self.longest - self.margin)
        return -min(max(over / self.margin, 0.0), 1.0)

    def _measure(self, text: str) -> int:
        if self.unit == "tokens":
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return len(text.split()) if self.unit == "words" else len(text)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(Path(self.model or "") / "tokenizer.json"))


def _has_tags(text: str, tags: list[str]) -> bool:
    """Return whether the text is these tags in this order, none of them inside another."""
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
