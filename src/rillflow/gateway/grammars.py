"""Grammars for answers of a given shape. They are checked before a token is sampled.

Invariants: an engine can enforce every grammar that passes here. A keyword of a schema that cannot be enforced is
refused; for a tool that is not strict it is left out. JSON is written like Python's `json.dumps`, without free
whitespace, in which small models lose themselves. An object with listed properties has no others unless its schema
allows them.

A grammar does not guarantee that an answer ends before `max_tokens`, nor that it makes sense. Bound the strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from rillflow.engine.requests import llguidance_grammar
from rillflow.gateway.reading.reasoning import ReasoningFormat
from rillflow.gateway.reading.tools import Json, Matching, Maybe, Piece, ToolFormat, Until
from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.render import Renderer
from rillflow.types import Grammar

LARGEST = 64 << 10  # bytes of a schema or grammar
DEEPEST = 32  # objects and lists within each other
_CHECKED = 512  # grammars whose check is cached
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OBJECT = {"type": "object"}
# Keys whose values are schemas: one, a list, or several by name.
_ONE, _MANY = ("items", "additionalProperties"), ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


# ---------------------------------------------------------------- grammars of a request


def of_schema(schema: Any, param: str, *, strict: bool = True) -> Grammar:
    """Return the grammar of a JSON schema. `param` is its path in the request.

    Without `strict`, keywords that cannot be enforced are left out.
    """
    if schema is True or schema == {}:
        schema = _OBJECT
    if not isinstance(schema, dict):
        raise CallRefused("a JSON schema must be an object", param=param)
    if _deeper(schema, DEEPEST):
        raise CallRefused(f"the schema is nested more than {DEEPEST} levels deep", param=param)
    _check_size(msgspec.json.encode(schema), param)
    closed = schema if _mentions(schema, "allOf") else _closed(schema)
    kept = closed if strict else _loosened(closed)
    text = msgspec.json.encode({**kept, "x-guidance": _options(strict=strict)}).decode()
    return _checked(Grammar(kind="json", text=text), param)


def _options(*, strict: bool) -> dict[str, Any]:
    """Return options for llguidance. Without `strict` it ignores keywords that it does not know."""
    return _SPACING if strict else _SPACING | {"lenient": True}


def any_object() -> Grammar:
    return of_schema(_OBJECT, "response_format")


def of_regex(regex: str, param: str) -> Grammar:
    _check_size(regex.encode(), param)
    return _checked(Grammar(kind="regex", text=regex), param)


def of_choices(choices: Sequence[str], param: str) -> Grammar:
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise CallRefused("choices must be a list of non-empty strings", param=param)
    return of_regex("|".join(f"(?:{re.escape(choice)})" for choice in choices), param)


def of_lark(text: str, param: str) -> Grammar:
    """Return the grammar of a text in Lark's syntax or llama.cpp's EBNF."""
    _check_size(text.encode(), param)
    try:
        text = any_to_lark(text)
    except Exception as error:  # the converter may raise anything for a malformed text
        raise CallRefused(f"the grammar cannot be read: {error}", param=param) from error
    return _checked(Grammar(kind="lark", text=text), param)


# ---------------------------------------------------------------- grammars in the formats of a model


class Calls(NamedTuple):
    """Tools in the OpenAI shape. One of them may be called, with `forced` must be; with `names`, only one of these."""

    tools: Sequence[Mapping[str, Any]]
    format: ToolFormat
    forced: bool
    names: Collection[str] | None = None


def composed(
    grammar: Grammar | None,
    calls: Calls | None,
    inside: bool | None,
    renderer: Renderer,
    reasoning: ReasoningFormat | None = None,
) -> Grammar | None:
    """Return the grammar of the whole answer: a call, or `grammar`, after the reasoning of a model that reasons.

    `inside` says whether the prompt has opened the reasoning (None: the model does not reason). A Lark grammar
    describes the whole answer and stays as it is.
    """
    if grammar is not None and (grammar.kind == "lark" or (calls is None and inside is None)):
        return grammar
    if grammar is None and calls is None:
        return None
    rules: list[str] = []
    bodies: list[str] = []
    if calls is not None:
        rules += _call_rules(calls, renderer)
        bodies.append("call")
    if grammar is not None and not (calls is not None and calls.forced):
        before, after = ("", "") if reasoning is None else (_text(text, renderer) for text in reasoning.answer)
        rules.append(f"answer: {before} {_inlined(grammar)} {after}")
        bodies.append("answer")
    body = "|".join(bodies)
    if inside is None or reasoning is None:
        return Grammar(kind="lark", text="\n".join([f"start: {body}", *rules]))
    lead = _text(reasoning.lead, renderer)
    thought = f"thought {lead}" if inside else f"({_text(reasoning.open, renderer)} thought {lead})?"
    # Blank text between reasoning and answer is dropped by the reader.
    head = [f"start: {thought} /[ \\n]{{0,2}}/ ({body})", _until("thought", reasoning.close, renderer)]
    return Grammar(kind="lark", text="\n".join([*head, *rules]))


def _call_rules(calls: Calls, renderer: Renderer) -> list[str]:
    rules: list[str] = []
    names: list[str] = []
    for number, tool in enumerate(calls.tools):
        function = tool["function"]
        if calls.names is not None and function["name"] not in calls.names:
            continue
        where = f"tools[{number}].function.parameters"
        strict = function.get("strict") is True
        parameters = msgspec.json.decode(of_schema(function.get("parameters") or {}, where, strict=strict).text)
        del parameters["x-guidance"]
        writing = _Writing(f"call_{len(names)}", _options(strict=strict), renderer)
        rules += writing.rules(calls.format.shape(function["name"], parameters))
        names.append(writing.name)
    return [f"call: {'|'.join(names)}", *rules]


class _Writing:
    """Writes the shape of one call as Lark rules, whose names begin with `name`."""

    def __init__(self, name: str, options: Mapping[str, Any], renderer: Renderer) -> None:
        self.name = name
        self._options = options
        self._renderer = renderer
        self._rules: list[str] = []

    def rules(self, pieces: Sequence[Piece]) -> list[str]:
        return [f"{self.name}: {self._sequence(pieces)}", *self._rules]

    def _sequence(self, pieces: Sequence[Piece]) -> str:
        return " ".join(filter(None, map(self._piece, pieces))) or '""'

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, str):
            return _text(piece, self._renderer)
        if isinstance(piece, Matching):
            return f"/{llguidance.regex_to_lark(piece.regex, '')}/"
        if isinstance(piece, Maybe):
            return f"({self._sequence(piece.pieces)})?"
        name = f"{self.name}_{len(self._rules)}"
        if isinstance(piece, Json):
            schema = {**piece.schema, "x-guidance": self._options}
            self._rules.append(f"{name}: %json {msgspec.json.encode(schema).decode()}")
        elif isinstance(piece, Until):
            self._rules.append(_until(name, piece.end, self._renderer))
        return name


def _until(name: str, end: str, renderer: Renderer) -> str:
    """Return a rule for any text up to `end`, which may be a special token."""
    ids = renderer.encode(end)
    if len(ids) == 1 and ids[0] in renderer.special_ids:
        return f"{name}: /(?s:.*)/ <[{ids[0]}]>"
    return f"{name}[suffix={_quoted(end)}]: /(?s:.*)/"


def _inlined(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    return f"/{llguidance.regex_to_lark(grammar.text, '')}/"


def _text(text: str, renderer: Renderer) -> str:
    """Return a literal. A marker may be a special token or its text; either matches."""
    parts: list[str] = []
    for token, said in renderer.pieces(text):
        parts.append(_quoted(said) if token is None else f"(<[{token}]>|{_quoted(said)})")
    return " ".join(parts)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


# ---------------------------------------------------------------- checks


@lru_cache(_CHECKED)
def _wrong(grammar: Grammar) -> str:
    return llguidance.LLMatcher.validate_grammar(llguidance_grammar(grammar))


def _checked(grammar: Grammar, param: str) -> Grammar:
    wrong = _wrong(grammar)
    if wrong and not wrong.startswith("WARNING"):
        raise CallRefused(f"this grammar cannot be enforced: {wrong}", param=param)
    return grammar


def _check_size(data: bytes, param: str) -> None:
    if len(data) > LARGEST:
        raise CallRefused(f"at most {LARGEST} bytes are allowed, got {len(data)}", param=param)


def _deeper(value: Any, than: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return than == 0 or any(_deeper(part, than - 1) for part in parts)


def _mentions(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_mentions(part, key) for part in value.values())
    return isinstance(value, list) and any(_mentions(part, key) for part in value)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those listed, unless it allows others."""
    if not isinstance(schema, dict):
        return schema
    made = _below(schema, _closed)
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def _loosened(schema: Any) -> Any:
    """Return a schema without the patterns and references that llguidance can neither enforce nor ignore."""
    if not isinstance(schema, dict):
        return schema
    made = _below(schema, _loosened)
    if "pattern" in made and not _matchable(made["pattern"]):
        del made["pattern"]
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {key: part for key, part in made["patternProperties"].items() if _matchable(key)}
    if not str(made.get("$ref", "#")).startswith("#"):
        del made["$ref"]
    return made


def _matchable(pattern: Any) -> bool:
    schema = {"type": "string", "pattern": pattern}
    return not _wrong(Grammar(kind="json", text=msgspec.json.encode(schema).decode()))


def _below(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `schema` with `change` applied to its direct subschemas."""
    made = dict(schema)
    for key in _ONE:
        if key in made:
            made[key] = change(made[key])
    for key in _MANY:
        if isinstance(made.get(key), list):
            made[key] = [change(part) for part in made[key]]
    for key in _NAMED:
        if isinstance(made.get(key), dict):
            made[key] = {name: change(part) for name, part in made[key].items()}
    return made
