"""Formats whose calls have no closing marker: JSON (Llama 3, plain JSON) and Python (Llama 3.2 and 4, others)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rillflow.gateway.reading.incremental import JsonScan, held_back
from rillflow.gateway.reading.tools import (
    Json,
    Maybe,
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
    parse_call,
)
from rillflow.gateway.trees.messages import dump_object, parse_object

# ---------------------------------------------------------------- Llama 3


TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """Llama 3: the answer begins with `{"name": …, "parameters": {…}}`, or has it after `<|python_tag|>`.

    Several objects are separated by `;`. Any other answer is text up to the tag. Blank text around calls is layout and
    is dropped; text after the last call is content.
    """

    marks = (TAG,)

    def parser(self, tools: Offered) -> ToolParser:
        return Llama3Parser(tools)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "; ".join(call_json(call, "parameters") for call in calls)

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [json_call(name, parameters, "parameters")]


class Llama3Parser:
    """Reads the answer in three states. `_lead` is the text before an object; it is dropped if the object is a call."""

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
        """Look for an object: at the beginning, after the tag, or after a call."""
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
        """Return whether an object may be a call here. After a call, only a `;` or the tag begins another one."""
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
        """Return what was held as text, and count it if the tag announced a call."""
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


# ---------------------------------------------------------------- plain JSON


_FENCE = "```"
# The beginning of an answer that may be calls; `_SO_FAR` matches the beginnings of that beginning.
_HEAD = re.compile(r"\s*(?:```(?:json|JSON)?\s*)?(?:\[\s*)?\{")
_SO_FAR = re.compile(r"\s*(?:`|``|```(?:j|js|jso|json|J|JS|JSO|JSON)?\s*\[?\s*|\[\s*)?")
_value = msgspec.json.Decoder(dict[str, Any] | list[dict[str, Any]])


class PlainJson(ToolFormat):
    """The whole answer is one object with a name and arguments, or a list of them, fenced or not.

    Anything else is text: another object, a list with an entry that is not a call, or words before or after it.
    """

    def parser(self, tools: Offered) -> ToolParser:
        return PlainJsonParser(tools)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        written = ", ".join(call_json(call) for call in calls)
        return written if len(calls) == 1 else f"[{written}]"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [json_call(name, parameters)]


class PlainJsonParser:
    """Holds the answer back while it may be calls: until its end, or until it cannot be.

    No marker announces a call, so `unparsed` stays 0.
    """

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
        """Return whether the answer may still be calls. Once its value begins, the value is scanned."""
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


# ---------------------------------------------------------------- Python

_CALLS_HEAD = re.compile(r"\s*(?:<\|python_(?:start|tag)\|>)?\s*\[\s*[A-Za-z_][\w.]{0,200}\(")
_CALLS_SO_FAR = re.compile(r"\s*<?[|a-z_]{0,16}>?\s*(?:\[\s*(?:[A-Za-z_][\w.]{0,200})?)?")
_AROUND = re.compile(r"^\s*(?:<\|python_(?:start|tag)\|>)?\s*|\s*(?:<\|python_end\|>)?\s*$")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_LONGEST = 1 << 20  # characters of an answer that are read as Python


class Pythonic(ToolFormat):
    """A list of calls with keyword arguments."""

    marks = ("<|python_start|>",)

    def parser(self, tools: Offered) -> ToolParser:
        return PythonicParser(tools)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return f"[{', '.join(map(_written, calls))}]"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        properties = parameters.get("properties", {})
        needed = [key for key in properties if key in parameters.get("required", ())]
        pieces: list[Piece] = [f"[{name}("]
        for number, key in enumerate(needed):
            pieces += [f"{', ' if number else ''}{key}=", Json(_value_schema(parameters, key))]
        rest = [key for key in properties if key not in needed]
        if needed:
            pieces += [Maybe((f", {key}=", Json(_value_schema(parameters, key)))) for key in rest]
        elif rest:  # no argument comes before these, so they have no comma to begin with
            pieces.append(Maybe((f"{rest[0]}=", Json(_value_schema(parameters, rest[0])))))
        return [*pieces, ")]"]


class PythonicParser:
    """Holds the answer back while it may be calls."""

    def __init__(self, tools: Offered) -> None:
        self.unparsed = 0
        self._tools = tools
        self._held: list[str] = []
        self._begun = self._text = False

    def feed(self, text: str) -> list[Part]:
        if self._text:
            return [text] if text else []
        self._held.append(text)
        if self._begun:
            return []
        so_far = "".join(self._held)
        self._begun = _CALLS_HEAD.match(so_far) is not None
        return [] if self._begun or _CALLS_SO_FAR.fullmatch(so_far) else self._give_up()

    def finish(self) -> list[Part]:
        if self._text:
            return []
        calls = _read("".join(self._held), self._tools) if self._begun else None
        if calls is None:
            self.unparsed += self._begun
            return self._give_up()
        return list(calls)

    def _give_up(self) -> list[Part]:
        held, self._text = "".join(self._held), True
        return [held] if held else []


def _read(text: str, tools: Offered) -> list[ParsedCall] | None:
    if len(text) > _LONGEST:
        return None
    try:
        tree = ast.parse(_AROUND.sub("", text), mode="eval").body
        entries = tree.elts if isinstance(tree, ast.List) else []
        calls = [_call(entry, tools) for entry in entries]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(entry: ast.expr, tools: Offered) -> ParsedCall | None:
    if not isinstance(entry, ast.Call) or entry.args or not isinstance(entry.func, ast.Name | ast.Attribute):
        return None
    name = ast.unparse(entry.func)
    arguments = {keyword.arg: _literal(keyword.value) for keyword in entry.keywords if keyword.arg is not None}
    if len(arguments) < len(entry.keywords) or not tools.may_call(name):
        return None
    written = dump_object(arguments)
    return ParsedCall(name, written) if parse_object(written) is not None else None


def _literal(value: ast.expr) -> Any:
    """Return a literal as JSON. Raises ValueError for a variable; `true`, `false` and `null` are JSON's."""
    if isinstance(value, ast.Name) and value.id in _JSON_NAMES:
        return _JSON_NAMES[value.id]
    if isinstance(value, ast.List | ast.Tuple):
        return [_literal(item) for item in value.elts]
    if isinstance(value, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in value.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("the keys of an object must be strings")
        return dict(zip(keys, map(_literal, value.values), strict=True))
    found = ast.literal_eval(value)
    if not isinstance(found, str | int | float | bool | None):
        raise ValueError("not a JSON value")
    return found


def _written(call: ParsedCall) -> str:
    arguments = parse_object(call.arguments) or {}
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _value_schema(parameters: Schema, key: str) -> Schema:
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return {**parameters["properties"][key], **definitions}
