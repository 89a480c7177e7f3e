"""What tool formats are made of: calls that have parsed, the tools on offer, parsers, and the shape of a call.

A format is one class: how a model writes calls of tools. Its parser reads them from sampled text, `write` writes them
for templates that have no place for calls, and `shape` says how a call must look, from which a grammar is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rillflow.gateway.trees.messages import dump_object, parse_object

Schema = Mapping[str, Any]


class ParsedCall(NamedTuple):
    """A call that a model wrote; `id` is the one that it gave to the call itself, in formats that have ids."""

    name: str
    arguments: str
    id: str = ""


Part = str | ParsedCall


class Offered(NamedTuple):
    """The tools of a request: the names that may be called (None: any), and the parameters' schemas by name."""

    allowed: Collection[str] | None = None
    schemas: Mapping[str, Schema] = {}  # a NamedTuple's default, which nobody changes

    def may_call(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


def offered(tools: Sequence[Mapping[str, Any]] | None, allowed: Collection[str] | None = None) -> Offered:
    """Return the tools of a request, given in the OpenAI shape."""
    functions = [tool["function"] for tool in tools or ()]
    return Offered(allowed, {function["name"]: function.get("parameters") or {} for function in functions})


class ToolParser(Protocol):
    """Turns text, piece by piece, into content and calls, the same ones however the text is cut.

    A call is told once it is whole and has parsed, and only of a tool that may be called. Text that looks like a call
    but cannot be parsed stays text, markers and all, and is counted in `unparsed`. So an agent is never shown a call
    that turns out to be none. The cost is linear in the text.
    """

    @property
    def unparsed(self) -> int: ...

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: decide about what was held back."""


# ---------------------------------------------------------------- the shape of a call


class Json(NamedTuple):
    """JSON of a schema, in the shape of a call."""

    schema: Schema


class Until(NamedTuple):
    """Any text up to `end`, and `end` itself."""

    end: str


class Matching(NamedTuple):
    """Text that matches a regular expression."""

    regex: str


class Maybe(NamedTuple):
    """Pieces that may be left out."""

    pieces: tuple[Piece, ...]


Piece = str | Json | Until | Matching | Maybe


class ToolFormat(ABC):
    """How a model writes calls of tools. A class of your own derives from this one; it is made without arguments.

    `marks` are texts by which a chat template shows the format even where it writes no calls itself.
    """

    marks: tuple[str, ...] = ()

    @abstractmethod
    def parser(self, tools: Offered) -> ToolParser:
        """Return a parser for one answer."""

    @abstractmethod
    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the text of `calls` as the model would write it."""

    @abstractmethod
    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        """Return what one call of the tool `name` with arguments of the schema `parameters` looks like."""


def json_call(name: str, parameters: Schema, given: str = "arguments", called: str = "name", **more: Schema) -> Json:
    """Return the shape of a call that is one JSON object. The definitions of the parameters move to the top."""
    own = dict(parameters)
    definitions = {key: own.pop(key) for key in ("$defs", "definitions") if key in own}
    properties = {called: {"const": name}, given: own, **more}
    return Json(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        | definitions
    )


# ---------------------------------------------------------------- calls as JSON


def parse_call(body: str, tools: Offered, *, bare: bool = False) -> ParsedCall | None:
    """Return the call that `body` describes, or None where it is not an object with a name and arguments."""
    value = parse_object(body.strip())
    return None if value is None else call_of(value, tools, bare=bare)


def call_of(value: Mapping[str, Any], tools: Offered, *, bare: bool = False) -> ParsedCall | None:
    """Models name the arguments `arguments` or `parameters`, whatever they were told.

    `bare`: no marker says that this is a call, so that an object with a name but no arguments is none.
    """
    name = value.get("name", value.get("tool_name"))
    given = value.get("arguments", value.get("parameters", None if bare else {}))
    arguments = parse_object(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not tools.may_call(name):
        return None
    id = value.get("id")
    return ParsedCall(name, dump_object(arguments), id if isinstance(id, str) else "")


def calls_of(body: str, tools: Offered) -> list[ParsedCall] | None:
    """Return the calls of a JSON list (or of one object), or None where one of its entries is none."""
    body = body.strip()
    value = parse_object(f'{{"calls": {body if body.startswith("[") else f"[{body}]"}}}')
    entries = None if value is None else value["calls"]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        return None
    calls = [call_of(entry, tools) for entry in entries]
    return None if None in calls else [call for call in calls if call is not None]


def call_json(call: ParsedCall, given: str = "arguments", called: str = "name") -> str:
    """Return a call as one JSON object, spaced as Python writes it."""
    return f'{{"{called}": {dump_object({"": call.name})[5:-1]}, "{given}": {call.arguments}}}'
