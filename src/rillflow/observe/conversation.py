"""Messages of an agent's conversation as lines for a terminal: the speaker, then the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

_WIDTH = 11  # columns of who speaks
_SHOWN = 400  # characters of a payload or an answer
_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def spoken(message: Mapping[str, Any], who: str = "", note: str = "") -> Text:
    """Return a message with its tool calls; `who` is the speaker where the role says too little, `note` stands behind
    it."""
    role = str(message.get("role", ""))
    style = _STYLES.get(role, "")
    parts: list[Text] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(Text(str(reasoning).strip(), "dim italic"))
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        parts.append(Text(content.rstrip()))
    elif content and not isinstance(content, str):
        parts.append(Text(json.dumps(content, ensure_ascii=False)))
    parts += [Text(called(call), "bold") for call in message.get("tool_calls") or ()]
    said = Text("\n").join(parts or [Text("(nothing)", "dim")])
    if note:
        said.append(f"  {note}", "dim")
    return labelled(who or role, said, style)


def called(call: Mapping[str, Any]) -> str:
    """Return a tool call as `name(argument=value, …)`; arguments that are not an object stay as written."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{function.get('name')}({arguments})"
    if not isinstance(arguments, Mapping):
        return f"{function.get('name')}({'' if arguments is None else arguments})"
    shown = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({shown})"


def labelled(label: str, said: Text | str, style: str = "") -> Text:
    """Return text with a label in front of its first line; the others are indented as far."""
    text = said if isinstance(said, Text) else Text(said)
    lines = text.split("\n", allow_blank=True)
    indented = Text("\n" + " " * _WIDTH).join(lines)
    return Text.assemble((f"{label:<{_WIDTH - 1}.{_WIDTH - 1}} ", style), indented)


def shortened(value: Any) -> str:
    """Return a payload or an answer as text, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def several(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def sampled_tokens(texts: Sequence[str], logprobs: Sequence[float]) -> Text:
    """Return tokens with their log-probs, those that were unlikely in red."""
    line = Text()
    for text, logprob in zip(texts, logprobs, strict=True):
        line.append(json.dumps(text, ensure_ascii=False)[1:-1] or "·", "red" if logprob < -2.3 else "green")
        line.append(f" {logprob:.2f}  ", "dim")
    return line
