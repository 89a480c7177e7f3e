"""Formats that write each argument between its own tags: Qwen3-Coder, GLM, MiniMax, Seed.

An argument is text, and the tool's schema gives its type. Without a type, text that is JSON is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from rillflow.gateway.reading.tools import (
    Blocks,
    Json,
    Matching,
    Maybe,
    Offered,
    ParsedCall,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    Until,
)
from rillflow.gateway.trees.messages import dump_object, parse_object

_PYTHON = {"True": True, "False": False, "None": None}
_NAME, _KEY, _VALUE = "NAME", "KEY", "VALUE"
_LINE = "\n"


class Tagged(ToolFormat):
    """A format described by two patterns: `call` with NAME in it, and `argument` with KEY and VALUE.

    Each call stands between `open` and `close`; with `shared`, all calls stand between one pair.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    call: ClassVar[tuple[str, str]]
    argument: ClassVar[str]
    shared: ClassVar[bool] = False

    def parser(self, tools: Offered) -> ToolParser:
        return Blocks(self.open, self.close, lambda body: self._calls(body, tools), quoting=False)

    def _calls(self, body: str, tools: Offered) -> list[ParsedCall] | None:
        head, end = (_spaced(part) for part in self.call)
        named = head.replace(_NAME, r'([^<>"\s]+)')
        # A call without an end marker ends with the block.
        pattern = re.compile(rf"\s*{named}(.*?){end or '$'}\s*", re.DOTALL)
        calls: list[ParsedCall] = []
        at = 0
        while at < len(body):
            found = pattern.match(body, at)
            call = None if found is None else self._call(found[1], found[2], tools)
            if found is None or call is None:
                return None
            calls.append(call)
            at = found.end()
        return calls or None

    def _call(self, name: str, body: str, tools: Offered) -> ParsedCall | None:
        if not tools.may_call(name):
            return None
        properties = tools.schemas.get(name, {}).get("properties", {})
        before, _, after = self.argument.partition(_VALUE)
        named = _spaced(before.removesuffix("\n")).replace(_KEY, r'([^<>"]+?)')
        # Blank text at the ends of a value belongs to it, except one line break if the format has one.
        line = r"\n?"
        value = f"{line if before.endswith(_LINE) else ''}(.*?){line if after.startswith(_LINE) else ''}"
        pattern = re.compile(rf"\s*{named}{value}{_spaced(after.strip())}\s*", re.DOTALL)
        arguments: dict[str, Any] = {}
        at = len(body) - len(body.lstrip())
        while at < len(body):
            found = pattern.match(body, at)
            if found is None or found[1] in arguments:
                return None
            arguments[found[1]] = _meant(found[2], properties.get(found[1]))
            at = found.end()
        text = dump_object(arguments)
        return ParsedCall(name, text) if parse_object(text) is not None else None

    def write(self, calls: Sequence[ParsedCall]) -> str:
        written = [self._written(call) for call in calls]
        if self.shared:
            return f"{self.open}\n{''.join(written)}{self.close}"
        return "\n".join(f"{self.open}{one}{self.close}" for one in written)

    def _written(self, call: ParsedCall) -> str:
        head, end = self.call
        arguments = "".join(
            self.argument.replace(_KEY, key).replace(_VALUE, value if isinstance(value, str) else json.dumps(value))
            for key, value in (parse_object(call.arguments) or {}).items()
        )
        return f"{head.replace(_NAME, call.name)}{arguments}{end}"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        head, end = self.call
        pieces: list[Piece] = [self.open + ("\n" if self.shared else ""), head.replace(_NAME, name)]
        for key in parameters.get("properties", {}):
            argument = self._argument(key, parameters)
            pieces += argument if key in parameters.get("required", ()) else [Maybe(tuple(argument))]
        return [*pieces, end, self.close]

    def _argument(self, key: str, parameters: Schema) -> list[Piece]:
        schema = parameters["properties"][key]
        before, _, after = self.argument.replace(_KEY, key).partition(_VALUE)
        if isinstance(schema, dict) and schema.get("enum") and all(isinstance(one, str) for one in schema["enum"]):
            return [before, Matching("|".join(re.escape(one) for one in schema["enum"])), after]
        if _is_text(schema):
            return [before, Until(after)]
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        return [before, Json({**schema, **definitions} if isinstance(schema, dict) else {}), after]


def _spaced(text: str) -> str:
    """Return a pattern for `text` that allows any blank text in place of a line break."""
    return r"\s*".join(map(re.escape, text.split("\n")))


def _is_text(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind in ("string", ["string"])


def _meant(text: str, schema: Any) -> Any:
    """Return the value of an argument by its schema. Templates write some values as Python does."""
    if _is_text(schema):
        return text
    stripped = text.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    found = parse_object(f'{{"value": {stripped}}}')
    return text if found is None or found.keys() != {"value"} else found["value"]


class Qwen3Coder(Tagged):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, a line each."""

    open, close = "<tool_call>", "</tool_call>"
    call = ("\n<function=NAME>\n", "</function>\n")
    argument = "<parameter=KEY>\nVALUE\n</parameter>\n"
    marks = ("<tool_call>\\n<function=",)


class Seed(Tagged):
    """`<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>`."""

    open, close = "<seed:tool_call>", "</seed:tool_call>"
    call = ("\n<function=NAME>\n", "</function>\n")
    argument = "<parameter=KEY>VALUE</parameter>\n"
    marks = ("<seed:tool_call>",)


class Glm(Tagged):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, a line each."""

    open, close = "<tool_call>", "</tool_call>"
    call = ("NAME\n", "")
    argument = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
    marks = ("<arg_key>",)


class MiniMax(Tagged):
    """`<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>`."""

    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    call = ('<invoke name="NAME">\n', "</invoke>\n")
    argument = '<parameter name="KEY">VALUE</parameter>\n'
    shared = True
    marks = ("<minimax:tool_call>",)
