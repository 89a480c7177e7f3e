"""Llama 3 style: the answer begins with `{"name": …, "parameters": {…}}`, or has it after `<|python_tag|>`.

Several objects are separated by `;`. An answer that begins otherwise is text up to the tag. Blank text around calls
is layout and dropped; what follows the last call is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rillflow.gateway.reading.stops import held_back
from rillflow.gateway.reading.tools.parts import (
    Offered,
    ParsedCall,
    Part,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    call_json,
    json_call,
    parse_call,
)
from rillflow.gateway.reading.tools.scanning import JsonScan

TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """Objects at the beginning of the answer, or behind the tag."""

    marks = (TAG,)

    def parser(self, tools: Offered) -> ToolParser:
        return Llama3Parser(tools)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "; ".join(call_json(call, "parameters") for call in calls)

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [json_call(name, parameters, "parameters")]


class Llama3Parser:
    """`_state` is what the text is read as now; `_lead` what stands before an object and falls with it."""

    def __init__(self, tools: Offered) -> None:
        self.unparsed = 0
        self._tools = tools
        self._held = ""
        self._lead = ""
        self._body: list[str] = []
        self._scan = JsonScan()
        self._tagged = self._called = False
        self._state: Callable[[list[Part]], bool] = self._seek

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        self.unparsed += self._tagged
        rest = self._lead + "".join(self._body) + self._held
        self._lead, self._held, self._body = "", "", []
        return [] if self._called and not rest.strip(" \t\r\n;") else ([rest] if rest else [])

    def _seek(self, parts: list[Part]) -> bool:
        """Before an object: at the beginning, behind the tag, or behind a call."""
        start = self._held.lstrip(" \t\r\n;" if self._called else None)
        if start.startswith("{") and self._may_begin(start):
            self._lead += self._held[: len(self._held) - len(start)]
            self._held, self._body, self._scan = start, [], JsonScan()
            self._state = self._object
            return True
        if start.startswith(TAG) and not self._tagged:
            size = len(self._held) - len(start) + len(TAG)
            self._lead, self._held = self._lead + self._held[:size], self._held[size:]
            self._tagged = True
            return True
        if TAG.startswith(start) and not self._tagged:
            return False
        if not start:
            return False
        self._give_up(parts)
        return True

    def _may_begin(self, start: str) -> bool:
        """Behind a call only a `;` or the tag begins another one."""
        return not self._called or self._tagged or ";" in self._held[: len(self._held) - len(start)]

    def _object(self, parts: list[Part]) -> bool:
        size = self._scan.feed(self._held)
        self._body.append(self._held[:size])
        self._held = self._held[size:]
        if not (self._scan.ended or self._scan.broken):
            return False
        body = "".join(self._body)
        call = parse_call(body, self._tools, bare=not self._tagged) if self._scan.ended else None
        if call is None:
            self._give_up(parts)
            return True
        parts.append(call)
        self._lead, self._body, self._called, self._tagged = "", [], True, False
        self._state = self._seek
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """No call here: what was held for one is text, and counted if the tag stood before it."""
        self.unparsed += self._tagged
        lost = self._lead + "".join(self._body)
        if lost:
            parts.append(lost)
        self._lead, self._body, self._tagged = "", [], False
        self._state = self._text

    def _text(self, parts: list[Part]) -> bool:
        before, marker, after = self._held.partition(TAG)
        if marker:
            self._lead, self._held, self._tagged = TAG, after, True
            self._called = False
            self._state = self._seek
        else:
            before = self._held[: len(self._held) - held_back(self._held, (TAG,))]
            self._held = self._held[len(before) :]
        if before:
            parts.append(before)
        return bool(marker)
