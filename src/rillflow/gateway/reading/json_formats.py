"""Formats with a marker before the call and JSON arguments.

Hermes writes one JSON object for each call, Granite, Phi, Nemotron and Command a JSON list of all calls, and Mistral,
DeepSeek, Kimi-K2 and gpt-oss the name as text before a JSON object of arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rillflow.gateway.reading.tools import (
    Blocks,
    Json,
    Matching,
    Offered,
    ParsedCall,
    Piece,
    Schema,
    ToolFormat,
    ToolParser,
    Values,
    call_json,
    call_of,
    calls_of,
    json_call,
    parse_call,
)
from rillflow.gateway.trees.messages import dump_object, parse_object

# ---------------------------------------------------------------- one JSON object for each call


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """Hermes, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    def parser(self, tools: Offered) -> ToolParser:
        def read(body: str) -> list[ParsedCall] | None:
            call = parse_call(body, tools)
            return None if call is None else [call]

        return Blocks(OPEN, CLOSE, read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(f"{OPEN}\n{call_json(call)}\n{CLOSE}" for call in calls)

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [OPEN, "\n", json_call(name, parameters), "\n", CLOSE]


# ---------------------------------------------------------------- one JSON list of all calls


class Listed(ToolFormat):
    """A list between `open` and `close`; without `close` it ends with its last bracket."""

    open: ClassVar[str]
    close: ClassVar[str] = ""

    def parser(self, tools: Offered) -> ToolParser:
        read = partial(calls_of, tools=tools)
        return Blocks(self.open, self.close, read) if self.close else Values((self.open,), read)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        return f"{self.open}[{', '.join(call_json(call) for call in calls)}]{self.close}"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        return [self.open, "[", json_call(name, parameters), "]", self.close]


class Granite(Listed):
    """Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}]`. Granite 4 writes as Hermes does."""

    open = "<|tool_call|>"
    marks = ("respond only with <|tool_call|>",)


class Phi(Listed):
    """Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>`, or `functools[…]`."""

    open = "<|tool_call|>"
    close = "<|/tool_call|>"
    marks = ("<|/tool_call|>", "<|/tool|>")

    def parser(self, tools: Offered) -> ToolParser:
        return PhiParser(tools)


class PhiParser:
    """Reads both spellings, one after the other."""

    def __init__(self, tools: Offered) -> None:
        read = partial(calls_of, tools=tools)
        self._marked = Blocks(Phi.open, Phi.close, read)
        self._named = Values(("functools",), read)

    @property
    def unparsed(self) -> int:
        return self._marked.unparsed + self._named.unparsed

    def feed(self, text: str) -> list[ParsedCall | str]:
        return self._all(self._marked.feed(text))

    def finish(self) -> list[ParsedCall | str]:
        return self._all(self._marked.finish()) + self._named.finish()

    def _all(self, parts: list[ParsedCall | str]) -> list[ParsedCall | str]:
        read: list[ParsedCall | str] = []
        for part in parts:
            read += self._named.feed(part) if isinstance(part, str) else [*self._named.finish(), part]
        return read


class Nemotron(Listed):
    """Nemotron Nano 2: `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`."""

    open = "<TOOLCALL>"
    close = "</TOOLCALL>"


class Command(Listed):
    """Command R7B and A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`."""

    open = "<|START_ACTION|>"
    close = "<|END_ACTION|>"

    def write(self, calls: Sequence[ParsedCall]) -> str:
        joined = ",\n".join(
            f'    {{"tool_call_id": "{number}", {call_json(call, "parameters", "tool_name")[1:]}'
            for number, call in enumerate(calls)
        )
        return f"{self.open}[\n{joined}\n]{self.close}"

    def shape(self, name: str, parameters: Schema) -> Sequence[Piece]:
        numbered = {"type": "string", "pattern": "^[0-9]{1,3}$"}
        found = json_call(name, parameters, "parameters", "tool_name")
        properties = {"tool_call_id": numbered, **found.schema["properties"]}
        return [
            self.open,
            "[\n    ",
            found._replace(schema={**found.schema, "properties": properties, "required": list(properties)}),
            "\n]",
            self.close,
        ]


# ---------------------------------------------------------------- the name as text, the arguments as JSON


_ID = "[a-zA-Z0-9]{9}"  # the ids that Mistral's own tokenizer accepts


def _named(name: str, arguments: str, tools: Offered, id: str = "") -> ParsedCall | None:
    value = parse_object(arguments.strip())
    return None if value is None else call_of({"name": name, "arguments": value, "id": id}, tools)


class Mistral(ToolFormat):
    """Up to 2024: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`. The parser reads the newer spelling too."""

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
    """V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` in a section with its own markers."""

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
    """Return the calls of a section, or None if it holds anything else.

    The last two groups of `pattern` are name and arguments; a group before them is the id.
    """
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

    The reasoning format of the same name reads the other channels.
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
