"""The events of a streamed response: items that open, grow and close one after the other, numbered throughout."""

from __future__ import annotations

from typing import Any

from rillflow.gateway.calls import Piece
from rillflow.gateway.dialects.items import call_item, message_item, reasoning_item, text_part
from rillflow.gateway.dialects.openai import logprob_entries
from rillflow.gateway.dialects.sse import named_event
from rillflow.gateway.trees.messages import ToolCall
from rillflow.gateway.trees.render import Renderer


class ResponseEvents:
    """Turns pieces into events. `output` are the items that have been closed."""

    def __init__(self, answer: str, renderer: Renderer) -> None:
        self.output: list[dict[str, Any]] = []
        self._answer = answer
        self._renderer = renderer
        self._number = 0
        self._open = ""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def life(self, what: str, response: dict[str, Any]) -> bytes:
        return self._event(f"response.{what}", response=response)

    def take(self, piece: Piece) -> bytes:
        entries = logprob_entries(piece.tokens, self._renderer)
        if piece.text:
            return self._begin("message") + self._say(piece.text, entries)
        if piece.reasoning:
            return self._begin("reasoning") + self._think(piece.reasoning)
        if piece.call is not None:
            return self._end() + self._call(piece.call)
        cut = piece.finish == "length"
        if not self.output and not self._open:  # an answer without anything is an empty message
            return self._begin("message") + self._end("incomplete" if cut else "completed")
        if cut and not self._open:
            self.output[-1]["status"] = "incomplete"
        return self._end("incomplete" if cut else "completed")

    # ------------------------------------------------------------ text and reasoning

    def _begin(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        before = self._end()
        self._open, self._texts, self._logprobs = kind, [], []
        if kind == "message":
            item, part = message_item(self._id("msg"), [], "in_progress"), text_part("", [])
        else:
            item, part = reasoning_item(self._id("rs"), "", "in_progress"), {"type": "reasoning_text", "text": ""}
        return (
            before + self._item("added", item) + self._event("response.content_part.added", part=part, **self._here())
        )

    def _say(self, text: str, entries: list[dict[str, Any]]) -> bytes:
        self._texts.append(text)
        self._logprobs += entries
        return self._event("response.output_text.delta", delta=text, logprobs=entries, **self._here())

    def _think(self, text: str) -> bytes:
        self._texts.append(text)
        return self._event("response.reasoning_text.delta", delta=text, **self._here())

    def _end(self, status: str = "completed") -> bytes:
        """Close what is open, if anything is."""
        if not self._open:
            return b""
        text, here = "".join(self._texts), self._here()
        part: dict[str, Any]
        if self._open == "message":
            part = text_part(text, self._logprobs)
            item = message_item(self._id("msg"), [part], status)
            said = self._event("response.output_text.done", text=text, logprobs=self._logprobs, **here)
        else:
            part = {"type": "reasoning_text", "text": text}
            item = reasoning_item(self._id("rs"), text, status)
            said = self._event("response.reasoning_text.done", text=text, **here)
        self._open = ""
        return said + self._event("response.content_part.done", part=part, **here) + self._done(item)

    # ------------------------------------------------------------ calls

    def _call(self, call: ToolCall) -> bytes:
        """Id and name first, then the arguments."""
        id, place = self._id("fc"), len(self.output)
        return b"".join(
            (
                self._item("added", call_item(id, call._replace(arguments=""), "in_progress")),
                self._event(
                    "response.function_call_arguments.delta", item_id=id, output_index=place, delta=call.arguments
                ),
                self._event(
                    "response.function_call_arguments.done",
                    item_id=id,
                    output_index=place,
                    name=call.name,
                    arguments=call.arguments,
                ),
                self._done(call_item(id, call)),
            )
        )

    # ------------------------------------------------------------ events

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._answer}_{len(self.output)}"

    def _here(self) -> dict[str, Any]:
        id = self._id("msg" if self._open == "message" else "rs")
        return {"item_id": id, "output_index": len(self.output), "content_index": 0}

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self.output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        told = self._item("done", item)
        self.output.append(item)
        return told

    def _event(self, type: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": type, "sequence_number": number} | fields)
