"""Formats that write all calls of an answer as one JSON list behind a marker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rillflow.gateway.reading.tools.blocks import Blocks, Values
from rillflow.gateway.reading.tools.parts import (
    Offered,
    ParsedCall,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    call_json,
    calls_of,
    json_call,
)


class Listed(ToolFormat):
    """`open` and `close` stand around the list; without `close` it ends with its last bracket."""

    open: ClassVar[str]
    close: ClassVar[str] = ""

    def parser(self, tools: Offered) -> ToolParser:
        read = partial(calls_of, tools=tools)
        return Blocks(self.open, self.close, read) if self.close else Values((self.open,), read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return f"{self.open}[{', '.join(call_json(call) for call in calls)}]{self.close}"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [self.open, "[", json_call(name, parameters), "]", self.close]


class Granite(Listed):
    """Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}]`. Granite 4 writes as Hermes does."""

    open = "<|tool_call|>"
    marks = ("respond only with <|tool_call|>",)


class Phi(Listed):
    """Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>`, or `functools[…]`."""

    open = "<|tool_call|>"
    close = "<|/tool_call|>"
    marks = ("<|/tool_call|>", "<|/tool|>")

    def parser(self, tools: Offered) -> ToolParser:
        return PhiParser(tools)


class PhiParser:
    """Reads both spellings: what the one leaves as text, the other reads."""

    def __init__(self, tools: Offered) -> None:
        read = partial(calls_of, tools=tools)
        self._marked = Blocks(Phi.open, Phi.close, read)
        self._named = Values(("functools",), read)

    @property
    def unparsed(self) -> int:
        return self._marked.unparsed + self._named.unparsed

    def feed(self, text: str) -> list[ParsedCall | str]:
        return self._all(self._marked.feed(text))

    def finish(self) -> list[ParsedCall | str]:
        return self._all(self._marked.finish()) + self._named.finish()

    def _all(self, parts: list[ParsedCall | str]) -> list[ParsedCall | str]:
        read: list[ParsedCall | str] = []
        for part in parts:
            read += self._named.feed(part) if isinstance(part, str) else [*self._named.finish(), part]
        return read


class Nemotron(Listed):
    """Nemotron Nano 2: `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`."""

    open = "<TOOLCALL>"
    close = "</TOOLCALL>"


class Command(Listed):
    """Command R7B and A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`."""

    open = "<|START_ACTION|>"
    close = "<|END_ACTION|>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        joined = ",\n".join(
            f'    {{"tool_call_id": "{number}", {call_json(call, "parameters", "tool_name")[1:]}'
            for number, call in enumerate(calls)
        )
        return f"{self.open}[\n{joined}\n]{self.close}"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        numbered = {"type": "string", "pattern": "^[0-9]{1,3}$"}
        found = json_call(name, parameters, "parameters", "tool_name")
        properties = {"tool_call_id": numbered, **found.schema["properties"]}
        return [
            self.open,
            "[\n    ",
            found._replace(schema={**found.schema, "properties": properties, "required": list(properties)}),
            "\n]",
            self.close,
        ]
