"""The stream of chat completions and of completions: one JSON object for each delta, all with the same head."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.gateway.calls import Answer
from rillflow.gateway.dialects.openai import StreamOptions, usage


class Chunks:
    """Writes chunks; what all of them share is encoded once."""

    def __init__(self, id: str, kind: str, model: str, answer: Answer, options: StreamOptions | None) -> None:
        self._answer = answer
        self._with_usage = options is not None and bool(options.include_usage)
        head = msgspec.json.encode({"id": id, "object": kind, "created": answer.created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"

    def one(self, choice: dict[str, Any]) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._tail

    def usage(self) -> bytes:
        """The last chunk, where the agent asked for it."""
        if not self._with_usage:
            return b""
        counted = msgspec.json.encode(usage(self._answer.prompt_tokens, self._answer.completion_tokens))
        return self._head + b'],"usage":' + counted + b"}\n\n"
