"""The bound on a request's text, over every field in which a client may put some.

Rendering and tokenising take time that grows with the text, so a text that cannot fit into the model's context is
refused by its length alone. Everything that a request holds counts, whatever its dialect and its field: a field that a
dialect learns to read is counted without being named here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.errors import ContextOverflow
from rillflow.gateway.trees.render import Renderer


def refuse_giants(request: msgspec.Struct, renderer: Renderer, context: int) -> None:
    """Raise ContextOverflow if the text of a decoded `request` cannot fit into `context` tokens."""
    most = renderer.characters_of(context)
    if _characters(request, most) >= most:
        raise ContextOverflow(
            f"this model's context is {context} tokens, which a request with {most} characters cannot fit into"
        )


def _characters(value: Any, most: int) -> int:
    """Count the characters of all texts in `value`, numbers and names of fields of JSON objects included, up to about
    `most`."""
    counted = 0
    left = [value]
    while left and counted < most:
        part = left.pop()
        if isinstance(part, str):
            counted += len(part)
        elif isinstance(part, dict):
            left += part
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, msgspec.Struct):
            left += [getattr(part, name) for name in part.__struct_fields__]
        elif part is not None:
            counted += 1
    return counted
