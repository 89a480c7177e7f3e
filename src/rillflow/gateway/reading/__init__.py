"""Reads sampled ids into text, reasoning and tool calls, in the formats that a policy's chat template uses.

The parts are the same however the ids arrive: one at a time, in chunks, or all at the end.

Formats have names. For `auto`, a call is rendered with the chat template, and the format whose parser reads it back is
taken. A template that writes tools or calls in an unknown format is refused, because a wrong format would take every
call for text. A template with no place for tools has no format, and requests with tools are refused.

    incremental     scanners for text that arrives in pieces: characters, stop strings, ends of JSON values
    reasoning       one class for each format of reasoning
    tools           tool calls: what every format is made of; json_formats, bare_formats and tagged: the formats
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rillflow.config import resolve_object
from rillflow.errors import ConfigError, did_you_mean
from rillflow.gateway.reading import json_formats, tagged
from rillflow.gateway.reading.bare_formats import Llama3, PlainJson, Pythonic
from rillflow.gateway.reading.incremental import Detokeniser, StopStrings
from rillflow.gateway.reading.reasoning import (
    CommandThink,
    Harmony,
    MistralThink,
    ReasoningFormat,
    SeedThink,
    Splitter,
    Think,
    Thought,
)
from rillflow.gateway.reading.tools import Offered, ParsedCall, Part, ToolFormat, ToolParser, offered
from rillflow.gateway.trees.messages import Body, dump_object
from rillflow.gateway.trees.probes import ARGUMENT, NAME, PROBE_TOOL
from rillflow.gateway.trees.template import ChatTemplate

Read = Part | Thought


class Reader:
    """Reads one answer: decodes it, cuts it at stop strings, splits off the reasoning and parses tool calls.

    A step that is None is left out.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        stops: StopStrings | None = None,
        reasoning: Splitter | None = None,
        tools: ToolParser | None = None,
    ) -> None:
        self._detokeniser = detokeniser
        self.stops = stops
        self._reasoning = reasoning
        self._tools = tools

    @property
    def stop(self) -> str:
        """The stop string that cut the answer; empty until one does."""
        return self.stops.hit if self.stops is not None else ""

    @property
    def unparsed(self) -> int:
        """The number of texts that look like tool calls but cannot be parsed."""
        return self._tools.unparsed if self._tools is not None else 0

    def feed(self, ids: Iterable[int]) -> list[Read]:
        text = self._detokeniser.feed(ids)
        if self.stops is not None:
            text = self.stops.feed(text)
        return self._split(text) if text else []

    def finish(self) -> list[Read]:
        """Return what was held back; the answer has ended."""
        return self._last(self._detokeniser.finish())

    def whole(self, ids: Iterable[int]) -> list[Read]:
        """Read a whole answer at once."""
        return self._last(self._detokeniser.whole(ids))

    def of_text(self, text: str) -> list[Read]:
        """Read a whole answer that is already decoded."""
        return self._last(text)

    def _last(self, text: str) -> list[Read]:
        if self.stops is not None:
            text = self.stops.feed(text) + self.stops.finish()
        read = self._split(text) if text else []
        if self._reasoning is not None:
            read += self._parsed(self._reasoning.finish())
        if self._tools is not None:
            read += self._tools.finish()
        return read

    def _split(self, text: str) -> list[Read]:
        return self._parsed([text] if self._reasoning is None else self._reasoning.feed(text))

    def _parsed(self, parts: list[str | Thought]) -> list[Read]:
        if self._tools is None:
            return list(parts)
        read: list[Read] = []
        for part in parts:
            read += [part] if isinstance(part, Thought) else self._tools.feed(part)
        return read


TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": json_formats.Hermes,
    "qwen3_coder": tagged.Qwen3Coder,
    "glm": tagged.Glm,
    "minimax": tagged.MiniMax,
    "seed": tagged.Seed,
    "mistral": json_formats.Mistral,
    "mistral_args": json_formats.MistralArgs,
    "deepseek": json_formats.DeepSeek,
    "deepseek_r1": json_formats.DeepSeekR1,
    "kimi": json_formats.Kimi,
    "harmony": json_formats.Harmony,
    "command": json_formats.Command,
    "nemotron": json_formats.Nemotron,
    "phi": json_formats.Phi,
    "granite": json_formats.Granite,
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
_SHOWN = 200  # characters of an unknown call in the error

Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def tool_format(asked: str, template: ChatTemplate, where: str = "policies.NAME") -> ToolFormat | None:
    """Return the format named `asked`, or for `auto` that of the chat template; None if the template has no tools."""
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
        f"the chat template {what}, which is not a known format of tool calls",
        f"set {where}.tools to one of {', '.join(TOOL_FORMATS)}, or to a class of your own as module:Class",
    )


def reasoning_format(asked: str, source: str, where: str = "policies.NAME") -> ReasoningFormat | None:
    """Return the format named `asked`, or for `auto` that of the chat template; None for a model without reasoning."""
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
        own = "or a class of your own as module:Class"
        raise ConfigError(f"{key}: no format {name!r}", f"{did_you_mean(name, known)}one of {', '.join(known)}, {own}")
    kind = resolve_object(name)
    if not isinstance(kind, type) or not issubclass(kind, base):
        parent = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{key}: {name} is not a {base.__name__}", f"derive it from {parent}")
    made: Format = kind()
    return made


def _read(format: ToolFormat, written: str) -> list[ParsedCall]:
    """Return the calls that a format reads from a template's text if they are those of the probe; else nothing."""
    parser = format.parser(_PROBED)
    calls = [part for part in [*parser.feed(written), *parser.finish()] if isinstance(part, ParsedCall)]
    return calls if [call[:2] for call in calls] == [(NAME, f'{{"key": "{ARGUMENT}"}}')] else []


def _writes(format: ToolFormat, texts: Sequence[str]) -> bool:
    """Return whether a format writes a call exactly as the template does."""
    return any(calls and format.write(calls) in text for text in texts if (calls := _read(format, text)))


_PROBED: Offered = offered([PROBE_TOOL])
