"""Plain JSON: the whole answer is one object with a name and arguments, or a list of them, fenced or not.

Anything else is text: another object, a list in which one entry is no call, or words before or after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rillflow.gateway.reading.tools.parts import (
    Offered,
    ParsedCall,
    Part,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    call_json,
    call_of,
    json_call,
)
from rillflow.gateway.reading.tools.scanning import JsonScan

_FENCE = "```"
# What an answer that may be calls begins with; each group may be missing where the text has come no further.
_HEAD = re.compile(r"\s*(?:```(?:json|JSON)?\s*)?(?:\[\s*)?\{")
_SO_FAR = re.compile(r"\s*(?:`|``|```(?:j|js|jso|json|J|JS|JSO|JSON)?\s*\[?\s*|\[\s*)?")
_value = msgspec.json.Decoder(dict[str, Any] | list[dict[str, Any]])


class PlainJson(ToolFormat):
    """An object, or a list of several, and nothing else."""

    def parser(self, tools: Offered) -> ToolParser:
        return PlainJsonParser(tools)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        written = ", ".join(call_json(call) for call in calls)
        return written if len(calls) == 1 else f"[{written}]"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [json_call(name, parameters)]


class PlainJsonParser:
    """Holds the answer back while it may be calls: until its end, or until something shows that it is none. Nothing
    marks a call, so none counts as one that could not be parsed."""

    unparsed = 0

    def __init__(self, tools: Offered) -> None:
        self._tools = tools
        self._held: list[str] = []
        self._scan: JsonScan | None = None
        self._rest = ""
        self._fenced = False
        self._text = False

    def feed(self, text: str) -> list[Part]:
        if self._text:
            return [text] if text else []
        self._held.append(text)
        possible = self._begun() if self._scan is None else self._follow(self._scan, text)
        return [] if possible else self._give_up()

    def finish(self) -> list[Part]:
        if self._text:
            return []
        calls = self._calls() if self._scan is not None and self._scan.ended else None
        return self._give_up() if calls is None else list(calls)

    def _give_up(self) -> list[Part]:
        held, self._text = "".join(self._held), True
        return [held] if held else []

    def _begun(self) -> bool:
        """Whether calls may begin here; once it is sure, the value is followed."""
        text = "".join(self._held)
        head = _HEAD.match(text)
        if head is None:
            return _SO_FAR.fullmatch(text) is not None
        before = text[: head.end()]
        self._fenced = _FENCE in before
        start = before.find("[") if "[" in before else before.index("{")
        self._held = [text[:start], text[start:]]
        self._scan = JsonScan()
        return self._follow(self._scan, text[start:])

    def _follow(self, scan: JsonScan, text: str) -> bool:
        size = 0 if scan.ended else scan.feed(text)
        self._rest += text[size:]
        if scan.broken:
            return False
        rest = self._rest.strip()
        return not rest or (self._fenced and _FENCE.startswith(rest))

    def _calls(self) -> list[ParsedCall] | None:
        held = "".join(self._held)
        body = held[len(self._held[0]) : len(held) - len(self._rest)]
        try:
            value = _value.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return None
        entries = value if isinstance(value, list) else [value]
        calls = [call_of(entry, self._tools, bare=True) for entry in entries]
        return [call for call in calls if call is not None] if calls and None not in calls else None
