"""A soft punishment of long answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rillflow.agents.rewards.answers import text_of
from rillflow.agents.rewards.shipped import ShippedReward
from rillflow.config.base import Positive


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
