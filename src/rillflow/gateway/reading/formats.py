"""The formats of tool calls and of reasoning by name, and how a policy's are chosen.

`auto` is decided by what the chat template writes: a probe's call is rendered, and the format whose parser reads it
back is the one. A template that writes tools or calls in a format that is not here is refused: a wrong format would
take every call for text. A template with no place for tools has no format, and requests with tools are refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rillflow.config import resolve_object
from rillflow.errors import ConfigError
from rillflow.gateway.reading.reasoning import (
    CommandThink,
    Harmony,
    MistralThink,
    ReasoningFormat,
    SeedThink,
    Think,
)
from rillflow.gateway.reading.tools import listed, named, tagged
from rillflow.gateway.reading.tools.hermes import Hermes
from rillflow.gateway.reading.tools.llama3 import Llama3
from rillflow.gateway.reading.tools.parts import Offered, ParsedCall, ToolFormat, offered
from rillflow.gateway.reading.tools.plain_json import PlainJson
from rillflow.gateway.reading.tools.pythonic import Pythonic
from rillflow.gateway.trees.messages import Body, dump_object
from rillflow.gateway.trees.probes import ARGUMENT, NAME, PROBE_TOOL
from rillflow.gateway.trees.template import ChatTemplate

TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "qwen3_coder": tagged.Qwen3Coder,
    "glm": tagged.Glm,
    "minimax": tagged.MiniMax,
    "seed": tagged.Seed,
    "mistral": named.Mistral,
    "mistral_args": named.MistralArgs,
    "deepseek": named.DeepSeek,
    "deepseek_r1": named.DeepSeekR1,
    "kimi": named.Kimi,
    "harmony": named.Harmony,
    "command": listed.Command,
    "nemotron": listed.Nemotron,
    "phi": listed.Phi,
    "granite": listed.Granite,
    "llama3": Llama3,
    "pythonic": Pythonic,
    "json": PlainJson,
}
REASONING_FORMATS: dict[str, type[ReasoningFormat]] = {
    "harmony": Harmony,
    "seed": SeedThink,
    "command": CommandThink,
    "mistral": MistralThink,
    "think": Think,
}
AUTO, NONE = "auto", "none"
_SHOWN = 200  # characters of a call that is not understood

Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def tool_format(asked: str, template: ChatTemplate, where: str = "policies.NAME") -> ToolFormat | None:
    """Return the format `asked` for, or (`auto`) the one that the chat template shows; None where it knows no tools."""
    if asked != AUTO:
        return _made(asked, TOOL_FORMATS, ToolFormat, f"{where}.tools")
    written = template.written_call
    texts = (written, *template.written_ends) if written else ()
    reading = [name for name, kind in TOOL_FORMATS.items() if any(_read(kind(), text) for text in texts)]
    exact = [name for name in reading if _writes(TOOL_FORMATS[name](), texts)]
    marked = [name for name, kind in TOOL_FORMATS.items() if any(mark in template.source for mark in kind.marks)]
    found = [*exact, *reading] or ([] if written else marked)
    if found:
        return TOOL_FORMATS[found[0]]()
    if not written and not template.writes_tools:
        return None
    what = f"writes a call as {written.strip()[:_SHOWN]!r}" if written else "writes tools, but no calls"
    raise ConfigError(
        f"the chat template {what}, which is no format of tool calls that is known here",
        f"set {where}.tools to one of {', '.join(TOOL_FORMATS)}, or to a class of your own as module:Class",
    )


def reasoning_format(asked: str, source: str, where: str = "policies.NAME") -> ReasoningFormat | None:
    """Return the format `asked` for, or (`auto`) the one whose markers the chat template has; None: no reasoning."""
    if asked == NONE:
        return None
    if asked != AUTO:
        return _made(asked, REASONING_FORMATS, ReasoningFormat, f"{where}.reasoning")
    kinds = [kind() for kind in REASONING_FORMATS.values()]
    return next((kind for kind in kinds if kind.shown_by(source)), None)


def written_calls(format: ToolFormat, calls: Sequence[Body]) -> str:
    """Return the text of a message's calls."""
    functions = [(call["function"], call["id"]) for call in calls]
    return format.write(
        [ParsedCall(function["name"], _dumped(function["arguments"]), id) for function, id in functions]
    )


def _dumped(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else dump_object(arguments)


def _made(name: str, known: Mapping[str, type[Format]], base: Any, key: str) -> Format:
    if name in known:
        return known[name]()
    if ":" not in name:
        close = difflib.get_close_matches(name, known, 1)
        near = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"{key}: no format {name!r}", f"{near}one of {', '.join(known)}, or a class of your own as module:Class"
        )
    kind = resolve_object(name)
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ConfigError(f"{key}: {name} is no {base.__name__}", f"derive it from {base.__module__}.{base.__name__}")
    made: Format = kind()
    return made


def _read(format: ToolFormat, written: str) -> list[ParsedCall]:
    """Return the calls that a format finds in what a template wrote, if they are the probe's."""
    parser = format.parser(_PROBED)
    calls = [part for part in [*parser.feed(written), *parser.finish()] if isinstance(part, ParsedCall)]
    return calls if [call[:2] for call in calls] == [(NAME, f'{{"key": "{ARGUMENT}"}}')] else []


def _writes(format: ToolFormat, texts: Sequence[str]) -> bool:
    """Return whether a format writes what it reads as the template does."""
    return any(calls and format.write(calls) in text for text in texts if (calls := _read(format, text)))


_PROBED: Offered = offered([PROBE_TOOL])
