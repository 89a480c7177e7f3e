"""`search`: passages of a local corpus."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rillflow.agents.tools.corpus import Corpus, Passage, Ranking
from rillflow.agents.tools.functions import tool_of
from rillflow.config.base import Positive, Section
from rillflow.contracts import Tool
from rillflow.errors import ToolError


class Search(Section):
    corpus: str = Field(description="JSONL file of passages (title, text), or its path below $RILLFLOW_DATA")
    passages: Annotated[int, Field(ge=1, le=100)] = Field(3, description="how many are found at most")
    characters: Positive = Field(600, description="that are shown of each")
    ranking: Ranking = Field("words", description="words (BM25), meaning (embeddings), or both")
    cache: str | None = Field(None, description="folder that keeps the index; default: ~/.cache/rillflow")

    async def open(self, timeout: float, stack: AsyncExitStack) -> Tool:
        cache = None if self.cache is None else Path(self.cache)
        corpus = await asyncio.to_thread(Corpus.open, self.corpus, ranking=self.ranking, cache=cache)

        def search(query: str) -> str:
            """Find the passages that fit a query best."""
            if not query.strip():
                raise ToolError("the query is empty")
            return listed(corpus.search(query, self.passages), self.characters)

        return tool_of(search, timeout=timeout)


def listed(passages: list[Passage], characters: int) -> str:
    """As a model reads them: numbered, each with its title."""
    if not passages:
        return "nothing was found"
    shown = [
        f"[{number}] {passage.title}: {_cut(passage.text, characters)}" for number, passage in enumerate(passages, 1)
    ]
    return "\n".join(shown)


def _cut(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[:characters].rsplit(' ', 1)[0]} …"
