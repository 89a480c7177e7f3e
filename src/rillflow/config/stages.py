"""The section of a recipe for a stage."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rillflow.config.base import Positive, Section


class StageConfig(Section):
    """A stage: workers that add columns to every sample of a policy before its trainer gets it; docs/stages.md."""

    kind: str = Field(description="reference, reward_model, or module:Class or file.py:Class of your own")
    model: str | None = Field(None, description="folder of the model that it runs; for kind reward_model")
    options: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments of its class")
    workers: Positive = Field(1, description="processes that `rillflow run` starts for it")
    groups: Positive = Field(4, description="most groups that a worker handles at once")
