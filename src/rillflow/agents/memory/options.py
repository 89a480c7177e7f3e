"""What a recipe may say of memories."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rillflow.config.base import Name, Positive, Section


class MemoryOptions(Section):
    """What is known of earlier episodes, in Qdrant: its local mode here, or a server."""

    url: str | None = Field(None, description="of a Qdrant server (key in QDRANT_API_KEY); default: in this process")
    journal: str | None = Field(None, description="JSONL file from which the local store is filled again at a start")
    collection: Name = "episodes"
    recall: Positive = Field(2, description="how many earlier episodes the planner is shown")
    least: Annotated[float, Field(ge=-1, le=1)] = Field(0.6, description="cosine below which none is shown")
    most: Positive = Field(10_000, description="episodes kept; the oldest go first")
