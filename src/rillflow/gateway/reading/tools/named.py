"""Formats with the tool's name as text and its arguments as one JSON object: Mistral, DeepSeek, Kimi-K2, gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rillflow.gateway.reading.tools.blocks import Blocks, Values
from rillflow.gateway.reading.tools.parts import (
    Json,
    Matching,
    Offered,
    ParsedCall,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    call_json,
    call_of,
    calls_of,
    json_call,
)
from rillflow.gateway.trees.messages import dump_object, parse_object

_ID = "[a-zA-Z0-9]{9}"  # what Mistral's own tokenizer asks of an id


def _named(name: str, arguments: str, tools: Offered, id: str = "") -> ParsedCall | None:
    value = parse_object(arguments.strip())
    return None if value is None else call_of({"name": name, "arguments": value, "id": id}, tools)


class Mistral(ToolFormat):
    """Up to 2024: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`. The parser reads both of its spellings."""

    marks = ("[TOOL_CALLS][",)
    _head = re.compile(r"\s*([^\[\s]+)\s*(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?\s*")

    def parser(self, tools: Offered) -> ToolParser:
        def read(body: str) -> list[ParsedCall] | None:
            if body.lstrip().startswith("["):
                return calls_of(body, tools)
            head, brace, rest = body.partition("{")
            found = self._head.fullmatch(head)
            call = None if found is None else _named(found[1], brace + rest, tools, found[2] or "")
            return None if call is None else [call]

        return Values(("[TOOL_CALLS]",), read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return f"[TOOL_CALLS][{', '.join(map(_with_id, calls))}]"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        id = {"type": "string", "pattern": f"^{_ID}$"}
        return ["[TOOL_CALLS]", "[", json_call(name, parameters, id=id), "]"]


def _with_id(call: ParsedCall) -> str:
    return f"{call_json(call)[:-1]}, {dump_object({'id': call.id})[1:]}" if call.id else call_json(call)


class MistralArgs(Mistral):
    """Since 2025: `[TOOL_CALLS]name[CALL_ID]…[ARGS]{…}` for each call; without the id since Magistral."""

    marks = ("[ARGS]",)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "".join(
            f"[TOOL_CALLS]{call.name}{f'[CALL_ID]{call.id}' if call.id else ''}[ARGS]{call.arguments}" for call in calls
        )

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return ["[TOOL_CALLS]", name, "[CALL_ID]", Matching(_ID), "[ARGS]", Json(parameters)]


class DeepSeek(ToolFormat):
    """V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, all between markers of their own."""

    marks = ("<｜tool▁calls▁begin｜>",)
    _call = re.compile(
        r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?\s*([^\s<]+)\s*(?:<｜tool▁sep｜>|```json)\s*"
        r"(\{.*?\})\s*(?:```)?\s*<｜tool▁call▁end｜>\s*",
        re.DOTALL,
    )

    def parser(self, tools: Offered) -> ToolParser:
        return Blocks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", lambda body: _all(self._call, body, tools))

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return f"<｜tool▁calls▁begin｜>{''.join(map(self._one, calls))}<｜tool▁calls▁end｜>"

    def _one(self, call: ParsedCall) -> str:
        return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        head = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", name, "<｜tool▁sep｜>"]
        return [*head, Json(parameters), "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]


class DeepSeekR1(DeepSeek):
    """R1 and V3: ```` function<｜tool▁sep｜>name ```json {…} ``` ```` between the same markers."""

    marks = ("'<｜tool▁sep｜>' + tool['function']['name'] + '\\n'",)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        written = "\n".join(map(self._one, calls))
        return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"

    def _one(self, call: ParsedCall) -> str:
        head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        return f"{head}{call.arguments}\n```<｜tool▁call▁end｜>"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        head = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", f"{name}\n```json\n"]
        return [*head, Json(parameters), "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]


class Kimi(ToolFormat):
    """Kimi-K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section."""

    _call = re.compile(
        r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^\s<:]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
        r"(\{.*?\})\s*<\|tool_call_end\|>\s*",
        re.DOTALL,
    )

    def parser(self, tools: Offered) -> ToolParser:
        def read(body: str) -> list[ParsedCall] | None:
            return _all(self._call, body, tools)

        return Blocks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        written = "".join(
            f"<|tool_call_begin|>{call.id or f'functions.{call.name}:{number}'}<|tool_call_argument_begin|>"
            f"{call.arguments}<|tool_call_end|>"
            for number, call in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            f"functions.{name}:",
            Matching("[0-9]{1,3}"),
            "<|tool_call_argument_begin|>",
            Json(parameters),
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ]


def _all(pattern: re.Pattern[str], body: str, tools: Offered) -> list[ParsedCall] | None:
    """Return the calls of a section, or None where some of it is none. The last two groups are name and arguments; a
    group before them is the id."""
    calls: list[ParsedCall] = []
    at = 0
    while at < len(body):
        found = pattern.match(body, at)
        if found is None:
            return None
        *id, name, arguments = found.groups()
        call = _named(name, arguments, tools, *id)
        if call is None:
            return None
        calls.append(call)
        at = found.end()
    return calls or None


class Harmony(ToolFormat):
    """gpt-oss: ` to=functions.name<|channel|>commentary json<|message|>{…}<|call|>`, or with the channel first.

    The reasoning format of the same name takes the other channels apart.
    """

    marks = ("<|channel|>commentary",)
    OPENS = ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", " to=functions.")
    _head = re.compile(r"([^\s<]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*")

    def parser(self, tools: Offered) -> ToolParser:
        def read(body: str) -> list[ParsedCall] | None:
            head, brace, rest = body.partition("{")
            found = self._head.fullmatch(head)
            call = None if found is None else _named(found[1], brace + rest, tools)
            return None if call is None else [call]

        return Values(self.OPENS, read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "".join(
            f" to=functions.{call.name}<|channel|>commentary json<|message|>{call.arguments}" for call in calls[:1]
        )

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        head = [f" to=functions.{name}", "<|channel|>", "commentary json", "<|message|>"]
        return [*head, Json(parameters), "<|call|>"]
