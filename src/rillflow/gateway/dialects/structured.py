"""The fields of requests that ask for structured answers: a JSON schema, a pattern, a choice, or a forced call.

An answer has at most one shape. A request for two is refused, with the names of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from rillflow.gateway import grammars
from rillflow.gateway.shapes import CallRefused
from rillflow.types import Grammar


class Guided(Protocol):
    """The fields of vLLM's clients beside OpenAI's."""

    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    structured_outputs: dict[str, Any] | None


def formatted(param: str, form: Mapping[str, Any] | None, *, nested: str | None = None) -> Grammar | None:
    """Return the grammar of a `{"type": …}`. Its schema is in it, or in the object under the key `nested`."""
    kind = "text" if form is None else form.get("type", "text")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return grammars.any_object()
    if kind != "json_schema":
        raise CallRefused(f"text, json_object and json_schema are supported, not {kind!r}", param=f"{param}.type")
    where = param if nested is None else f"{param}.{nested}"
    holder = form if nested is None else form.get(nested)
    if not isinstance(holder, dict) or "schema" not in holder:
        raise CallRefused("a json_schema needs a schema", param=f"{where}.schema")
    return grammars.of_schema(holder["schema"], f"{where}.schema")


def guided(request: Guided, form: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of `response_format` (`form`) or of vLLM's own fields; None if none is set."""
    if form is None and not request.structured_outputs and not any(_guided(request)):
        return None
    asked = zip(_GUIDED, _guided(request), strict=True)
    found = {param: _of(param.removeprefix("guided_"), value, param) for param, value in asked if value}
    for kind, value in (request.structured_outputs or {}).items():
        if value and kind in _KINDS:
            param = f"structured_outputs.{kind}"
            found[param] = _of(kind, value, param)
    if (grammar := formatted("response_format", form, nested="json_schema")) is not None:
        found["response_format"] = grammar
    if len(found) > 1:
        raise CallRefused(f"an answer has one shape, but several are set: {', '.join(found)}", param=list(found)[-1])
    return next(iter(found.values()), None)


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_guided = attrgetter(*_GUIDED)
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _of(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json_object":
        return grammars.any_object()
    if kind == "json":
        return grammars.of_schema(_schema(value, param), param)
    if kind == "choice":
        if not isinstance(value, list):
            raise CallRefused("choices must be a list of strings", param=param)
        return grammars.of_choices(value, param)
    if not isinstance(value, str):
        raise CallRefused("it must be a string", param=param)
    return grammars.of_regex(value, param) if kind == "regex" else grammars.of_lark(value, param)


def _schema(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise CallRefused(f"the schema is not JSON: {error}", param=param) from error


def functions(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions among the tools of a chat request.

    Custom tools and tools that a provider would run itself are left out, because they cannot be called here.
    """
    found = []
    for place, tool in enumerate(tools or ()):
        function = tool.get("function")
        if isinstance(function, dict):
            if not isinstance(function.get("name"), str):
                raise CallRefused("a function needs a name", param=f"tools[{place}].function.name")
            found.append(tool)
        elif checked_type(tool, place) == "function":
            raise CallRefused("a tool of type function needs a function", param=f"tools[{place}].function")
    return found


def checked_type(tool: Mapping[str, Any], place: int) -> str:
    """Return the type of the tool at `place`; refuse a tool without one."""
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise CallRefused("a tool needs a function or a type", param=f"tools[{place}]")
    return kind


def forced(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...]:
    """Return the names of the tools of which one must be called; empty if none must."""
    names = _names(tools)
    if choice in (None, "none", "auto"):
        return ()
    if (only := _allowed(choice, names)) is not None:
        return only.names if only.required else ()
    if choice == "required":
        if not names:
            raise CallRefused("a call can only be required if the request has tools", param="tool_choice")
        return names
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return ()  # a tool that a provider would run itself
    return (_known(choice, names),)


def allowed(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str, ...] | None:
    """Return the names of the tools that may be called; None if all may."""
    only = _allowed(choice, _names(tools))
    return None if only is None else only.names


class _Allowed(NamedTuple):
    names: tuple[str, ...]
    required: bool


def _allowed(choice: str | Mapping[str, Any] | None, names: tuple[str, ...]) -> _Allowed | None:
    """Return a choice of type `allowed_tools`; None for any other. Chat completions nest it, responses do not."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise CallRefused("allowed_tools needs a mode, auto or required, and a list of tools", param="tool_choice")
    chosen = {_known(tool, names) for tool in tools if tool.get("type", "function") == "function"}
    if mode == "required" and not chosen:
        raise CallRefused("a call can only be required if the request has tools", param="tool_choice")
    return _Allowed(tuple(name for name in names if name in chosen), mode == "required")


def _known(tool: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the name of a chosen function, which must be one of the tools."""
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else tool.get("name")
    if not isinstance(name, str) or name not in names:
        raise CallRefused(f"tool {name!r} is not among the tools", param="tool_choice")
    return name


def _names(tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in tools or ())
