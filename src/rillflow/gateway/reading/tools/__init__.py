"""Tool calls in sampled text: one file for each style in which models write them."""

from __future__ import annotations

from collections.abc import Callable

from rillflow.gateway.reading.tools.hermes import Hermes
from rillflow.gateway.reading.tools.llama3 import Llama3
from rillflow.gateway.reading.tools.parts import ParsedCall, Part, ToolParser
from rillflow.gateway.reading.tools.plain_json import PlainJson

__all__ = ["STYLES", "ParsedCall", "Part", "ToolParser", "style_of"]

_LLAMA3 = ("<|python_tag|>", "<|start_header_id|>")  # not every template of that family shows its tag

STYLES: dict[str, Callable[..., ToolParser]] = {"hermes": Hermes, "llama3": Llama3, "json": PlainJson}


def style_of(asked: str, template: str) -> str:
    """The style that a policy's model writes: the one `asked` for, or what its chat template shows.

    A template that says nothing of tools leaves the form to the agent's own instructions; the one with markers is
    then the only one that cannot be mistaken for an answer.
    """
    if asked != "auto":
        return asked
    if "<tool_call>" in template or "tools" not in template:
        return "hermes"
    return "llama3" if any(mark in template for mark in _LLAMA3) else "json"
