"""Hermes, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.gateway.reading.tools.blocks import Blocks
from rillflow.gateway.reading.tools.parts import (
    Offered,
    ParsedCall,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    call_json,
    json_call,
    parse_call,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """One object in each pair of markers."""

    def parser(self, tools: Offered) -> ToolParser:
        def read(body: str) -> list[ParsedCall] | None:
            call = parse_call(body, tools)
            return None if call is None else [call]

        return Blocks(OPEN, CLOSE, read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(f"{OPEN}\n{call_json(call)}\n{CLOSE}" for call in calls)

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [OPEN, "\n", json_call(name, parameters), "\n", CLOSE]
