"""Tool calls in sampled text: what every format is made of, and the parsers that most formats share.

A format is one class that says how a model writes tool calls. Its parser reads them from sampled text, `write` writes
them for templates that have no place for calls, and `shape` describes one call, from which a grammar is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rillflow.gateway.reading.incremental import JsonScan, Quotes, held_back
from rillflow.gateway.trees.messages import dump_object, parse_object

Schema = Mapping[str, Any]


class ParsedCall(NamedTuple):
    """A call that a model wrote. `id` is the id that the model wrote, in formats that have ids."""

    name: str
    arguments: str
    id: str = ""


Part = str | ParsedCall


class Offered(NamedTuple):
    """The tools of a request: the names that may be called (None: any), and the schemas of their parameters by name."""

    allowed: Collection[str] | None = None
    schemas: Mapping[str, Schema] = {}  # never changed

    def may_call(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


def offered(tools: Sequence[Mapping[str, Any]] | None, allowed: Collection[str] | None = None) -> Offered:
    """Return the tools of a request, given in the OpenAI shape."""
    functions = [tool["function"] for tool in tools or ()]
    return Offered(allowed, {function["name"]: function.get("parameters") or {} for function in functions})


class ToolParser(Protocol):
    """Turns text that arrives in pieces into content and calls; the result does not depend on how the text is cut.

    A call is returned once it is complete and parsed, and only if its tool may be called. Text that looks like a call
    but cannot be parsed stays text, with its markers, and is counted in `unparsed`. The cost is linear in the text.
    """

    @property
    def unparsed(self) -> int: ...

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Return what was held back; the text has ended."""


# ---------------------------------------------------------------- the shape of a call


class Json(NamedTuple):
    """JSON of a schema."""

    schema: Schema


class Until(NamedTuple):
    """Any text up to `end`, and `end` itself."""

    end: str


class Matching(NamedTuple):
    """Text that matches a regular expression."""

    regex: str


class Maybe(NamedTuple):
    """Optional pieces."""

    pieces: tuple[Piece, ...]


Piece = str | Json | Until | Matching | Maybe


class ToolFormat(ABC):
    """How a model writes tool calls. Derive your own format from this class; its constructor takes no arguments.

    `marks` are texts that identify the format in a chat template that writes no calls itself.
    """

    marks: tuple[str, ...] = ()

    @abstractmethod
    def parser(self, tools: Offered) -> ToolParser:
        """Return a parser for one answer."""

    @abstractmethod
    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return `calls` as the model would write them."""

    @abstractmethod
    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        """Return the shape of one call of the tool `name`, whose arguments have the schema `parameters`."""


def json_call(name: str, parameters: Schema, given: str = "arguments", called: str = "name", **more: Schema) -> Json:
    """Return the shape of a call that is one JSON object. Definitions in `parameters` move to the top of the schema."""
    own = dict(parameters)
    definitions = {key: own.pop(key) for key in ("$defs", "definitions") if key in own}
    properties = {called: {"const": name}, given: own, **more}
    return Json(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        | definitions
    )


# ---------------------------------------------------------------- calls as JSON


def parse_call(body: str, tools: Offered, *, bare: bool = False) -> ParsedCall | None:
    """Return the call in `body`, or None if `body` is not a JSON object with a name and arguments."""
    value = parse_object(body.strip())
    return None if value is None else call_of(value, tools, bare=bare)


def call_of(value: Mapping[str, Any], tools: Offered, *, bare: bool = False) -> ParsedCall | None:
    """Return the call that a JSON object describes, or None. Models write `arguments` or `parameters`, as they like.

    `bare`: no marker announces the call, so an object with a name but without arguments does not count as one.
    """
    name = value.get("name", value.get("tool_name"))
    given = value.get("arguments", value.get("parameters", None if bare else {}))
    arguments = parse_object(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not tools.may_call(name):
        return None
    id = value.get("id")
    return ParsedCall(name, dump_object(arguments), id if isinstance(id, str) else "")


def calls_of(body: str, tools: Offered) -> list[ParsedCall] | None:
    """Return the calls in a JSON list or object, or None if one of its entries is not a call."""
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


# ---------------------------------------------------------------- parsers of calls behind a marker


# Returns the calls in the text of one block, or None if it cannot be parsed.
ReadCalls = Callable[[str], Sequence[ParsedCall] | None]


class _Marked:
    """Finds the opening marker of a call.

    Text before, between and after calls is content; blank text after a call is layout and is dropped. `_opened` is the
    marker of the current call, empty outside one. `_held` is text that may yet become a marker.
    """

    def __init__(self, opens: tuple[str, ...], read: ReadCalls) -> None:
        self.unparsed = 0
        self._opens = opens
        self._read = read
        self._held = ""
        self._opened = ""
        self._body: list[str] = []
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._inside(parts) if self._opened else self._outside(parts):
            pass
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        raise NotImplementedError

    def _outside(self, parts: list[Part]) -> bool:
        found = [(at, marker) for marker in self._opens if (at := self._held.find(marker)) >= 0]
        if found:
            at, self._opened = min(found)
            self._emit(self._held[:at], parts)
            self._held, self._body = self._held[at + len(self._opened) :], []
            return True
        ready = self._held[: len(self._held) - held_back(self._held, self._opens)]
        if self._after_call and not ready.strip():
            return False
        self._emit(ready, parts)
        self._held = self._held[len(ready) :]
        return False

    def _add_calls(self, calls: Sequence[ParsedCall], parts: list[Part]) -> None:
        parts += calls
        self._after_call = True

    def _lost(self, text: str, parts: list[Part]) -> None:
        """Return a call that cannot be parsed as text, and count it."""
        self.unparsed += 1
        self._emit(text, parts)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if not text or (self._after_call and not text.strip()):
            return
        self._after_call = False
        parts.append(text)


class Blocks(_Marked):
    """Calls between an opening and a closing marker.

    With `quoting`, a closing marker inside a JSON string belongs to the string.
    """

    def __init__(self, open: str, close: str, read: ReadCalls, *, quoting: bool = True) -> None:
        super().__init__((open,), read)
        self._close = close
        self._quoting = quoting
        self._quotes = Quotes()

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._opened:
            self._reread("".join(self._body) + self._held, parts)
        else:
            self._emit(self._held, parts)
        self._held = self._opened = ""
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        before, marker, after = self._held.partition(self._close)
        if not marker:
            ready = self._held[: len(self._held) - held_back(self._held, (self._close,))]
            self._take(ready)
            self._held = self._held[len(ready) :]
            return False
        self._take(before)
        self._held = after
        if self._quotes.quoted:
            self._body.append(self._close)
            return True
        self._ended("".join(self._body), parts)
        self._opened, self._quotes = "", Quotes()
        return True

    def _take(self, text: str) -> None:
        self._body.append(text)
        if self._quoting:
            self._quotes.feed(text)

    def _ended(self, body: str, parts: list[Part]) -> None:
        # An opening marker that was never closed is text; the call after it still counts.
        (open,) = self._opens
        calls, lost = self._read(body), ""
        if calls is None and open in body:
            lost, _, last = body.rpartition(open)
            calls, lost = self._read(last), open + lost
        if calls is None:
            self._lost(open + body + self._close, parts)
            return
        if lost:
            self._lost(lost, parts)
        self._add_calls(calls, parts)

    def _reread(self, body: str, parts: list[Part]) -> None:
        """Read a call without an end again: an open quote may have hidden the closing marker."""
        (open,) = self._opens
        while (at := body.find(self._close)) >= 0:
            self._ended(body[:at], parts)
            before, marker, body = body[at + len(self._close) :].partition(open)
            self._emit(before, parts)
            if not marker:
                return
        self._lost(open + body, parts)


class Values(_Marked):
    """Calls that end with their JSON value: a marker, a head (such as the name), and an object or a list.

    The head has at most `_HEAD` characters. A list must follow the marker directly.
    """

    _HEAD = 400

    def __init__(self, opens: tuple[str, ...], read: ReadCalls) -> None:
        super().__init__(opens, read)
        self._scan: JsonScan | None = None

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._opened:
            self._lost(self._opened + "".join(self._body) + self._held, parts)
        else:
            self._emit(self._held, parts)
        self._held = self._opened = ""
        self._body, self._scan = [], None
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        if self._scan is None and not self._begun(parts):
            return not self._opened
        assert self._scan is not None
        size = self._scan.feed(self._held)
        self._body.append(self._held[:size])
        self._held = self._held[size:]
        if not (self._scan.ended or self._scan.broken):
            return False
        body = "".join(self._body)
        calls = self._read(body) if self._scan.ended else None
        if calls is None:
            self._lost(self._opened + body, parts)
        else:
            self._add_calls(calls, parts)
        self._opened, self._scan = "", None
        return True

    def _begun(self, parts: list[Part]) -> bool:
        """Return whether the value has begun. If none comes, the marker becomes text."""
        start = self._held.lstrip()
        blank = len(self._held) - len(start)
        at = blank if start.startswith("[") else self._held.find("{")
        if at >= 0 and at <= self._HEAD:
            self._body, self._held = [self._held[:at]], self._held[at:]
            self._scan = JsonScan()
            return True
        if at < 0 and len(self._held) <= self._HEAD:
            return False
        self._lost(self._opened, parts)
        self._opened = ""
        return False
