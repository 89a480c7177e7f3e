"""Llama 3.2 and 4, and others: the whole answer is Python, a list of calls such as `[count(box="red", most=3)]`.

The list may stand between markers (`<|python_start|>`, `<|python_end|>`, `<|python_tag|>`). Anything else is text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

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
)
from rillflow.gateway.trees.messages import dump_object, parse_object

_HEAD = re.compile(r"\s*(?:<\|python_(?:start|tag)\|>)?\s*\[\s*[A-Za-z_][\w.]{0,200}\(")
_SO_FAR = re.compile(r"\s*<?[|a-z_]{0,16}>?\s*(?:\[\s*(?:[A-Za-z_][\w.]{0,200})?)?")
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
            pieces += [f"{', ' if number else ''}{key}=", Json(_value(parameters, key))]
        rest = [key for key in properties if key not in needed]
        if needed:
            pieces += [Maybe((f", {key}=", Json(_value(parameters, key)))) for key in rest]
        elif rest:  # no argument comes before these, so they have no comma to begin with
            pieces.append(Maybe((f"{rest[0]}=", Json(_value(parameters, rest[0])))))
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
        self._begun = _HEAD.match(so_far) is not None
        return [] if self._begun or _SO_FAR.fullmatch(so_far) else self._give_up()

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


def _value(parameters: Schema, key: str) -> Schema:
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return {**parameters["properties"][key], **definitions}
