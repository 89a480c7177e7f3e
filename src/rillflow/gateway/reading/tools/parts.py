"""What tool parsers make of sampled text: content, and calls that have parsed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from rillflow.gateway.trees.messages import dump_object, parse_object


class ParsedCall(NamedTuple):
    name: str
    arguments: str


Part = str | ParsedCall


class ToolParser(Protocol):
    """Turns text, piece by piece, into content and calls, the same ones however the text is cut.

    It is made with the names of the tools that may be called, or None where any may: a call of another tool stays
    text. A call is told once it is whole and has parsed; what looks like one but cannot be parsed stays text, markers
    and all. So an agent is never shown a call that turns out to be none. The cost is linear in the text.
    """

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back is decided."""


def parse_call(body: str, allowed: Collection[str] | None, *, bare: bool = False) -> ParsedCall | None:
    """The call that `body` describes, or None where it is not an object with a name and an object of arguments."""
    value = parse_object(body.strip())
    return None if value is None else call_of(value, allowed, bare=bare)


def call_of(value: Mapping[str, Any], allowed: Collection[str] | None, *, bare: bool = False) -> ParsedCall | None:
    """Models name the arguments `arguments` or `parameters`, whatever they were told.

    `bare`: no marker says that this is a call, so that an object with a name but no arguments is none.
    """
    name, given = value.get("name"), value.get("arguments", value.get("parameters", None if bare else {}))
    arguments = parse_object(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    if allowed is not None and name not in allowed:
        return None
    return ParsedCall(name, dump_object(arguments))
