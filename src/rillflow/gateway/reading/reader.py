"""Reads sampled ids into what an agent is shown: text, reasoning and tool calls.

The parts are the same however the ids arrive: one at a time, in chunks, or all at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

from rillflow.gateway.reading.incremental import Detokeniser, StopStrings
from rillflow.gateway.reading.reasoning import Splitter, Thought
from rillflow.gateway.reading.tools import Part, ToolParser

Read = Part | Thought


class Reader:
    """Reads one answer: decodes it, cuts it at stop strings, splits off the reasoning and parses tool calls.

    A step that is None is left out.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        stops: StopStrings | None = None,
        reasoning: Splitter | None = None,
        tools: ToolParser | None = None,
    ) -> None:
        self._detokeniser = detokeniser
        self.stops = stops
        self._reasoning = reasoning
        self._tools = tools

    @property
    def stop(self) -> str:
        """The stop string that cut the answer; empty until one does."""
        return self.stops.hit if self.stops is not None else ""

    @property
    def unparsed(self) -> int:
        """The number of texts that look like tool calls but cannot be parsed."""
        return self._tools.unparsed if self._tools is not None else 0

    def feed(self, ids: Iterable[int]) -> list[Read]:
        text = self._detokeniser.feed(ids)
        if self.stops is not None:
            text = self.stops.feed(text)
        return self._split(text) if text else []

    def finish(self) -> list[Read]:
        """Return what was held back; the answer has ended."""
        return self._last(self._detokeniser.finish())

    def whole(self, ids: Iterable[int]) -> list[Read]:
        """Read a whole answer at once."""
        return self._last(self._detokeniser.whole(ids))

    def of_text(self, text: str) -> list[Read]:
        """Read a whole answer that is already decoded."""
        return self._last(text)

    def _last(self, text: str) -> list[Read]:
        if self.stops is not None:
            text = self.stops.feed(text) + self.stops.finish()
        read = self._split(text) if text else []
        if self._reasoning is not None:
            read += self._parsed(self._reasoning.finish())
        if self._tools is not None:
            read += self._tools.finish()
        return read

    def _split(self, text: str) -> list[Read]:
        return self._parsed([text] if self._reasoning is None else self._reasoning.feed(text))

    def _parsed(self, parts: list[str | Thought]) -> list[Read]:
        if self._tools is None:
            return list(parts)
        read: list[Read] = []
        for part in parts:
            read += [part] if isinstance(part, Thought) else self._tools.feed(part)
        return read
