"""The shapes that rows of supervised training may have. What does not fit one is refused, naming the key.

Keys that a shape does not know are ignored: datasets have more columns than a task needs. Messages are OpenAI's;
arguments of tool calls may be JSON text or, as many datasets have them, an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from rillflow.errors import DataError, RillflowError
from rillflow.gateway.dialects.chat import ChatMessage, to_message
from rillflow.gateway.trees.messages import Message

# Text stands for itself; messages are written by the chat template.
Said = str | list[ChatMessage]
Tools = list[dict[str, Any]]
Label = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Demonstration(msgspec.Struct):
    """Of sft: a conversation, or what was asked and what is to be answered."""

    messages: list[ChatMessage] | None = None
    prompt: Said | None = None
    completion: Said | None = None
    tools: Tools | None = None


class Answered(msgspec.Struct, kw_only=True):
    """Of a reward model at work: an answer, and what it answers."""

    answer: Said
    prompt: Said | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None


class Pair(msgspec.Struct, kw_only=True):
    """Of reward: two answers to the same question, the first of which is better, by `margin` if that is known."""

    chosen: Said
    rejected: Said
    prompt: Said | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    margin: float = 0.0


class Step(msgspec.Struct, kw_only=True):
    text: str | None = None
    messages: list[ChatMessage] | None = None


class LabelledStep(Step, kw_only=True):
    """How good a step is, from 0 to 1."""

    label: Label


class Stepwise(msgspec.Struct, kw_only=True):
    """Of a process reward model at work: a question and the steps towards its answer."""

    steps: Sequence[Step]
    prompt: Said | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None


class LabelledSteps(Stepwise, kw_only=True):
    """Of process_reward."""

    steps: list[LabelledStep]


Shape = TypeVar("Shape", bound=msgspec.Struct)


def read_row(payload: Mapping[str, Any], shape: type[Shape], where: str) -> Shape:
    """The row; DataError, which says `where` it is, when it does not have this shape."""
    try:
        return msgspec.convert(_as_text(dict(payload)), shape)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DataError(f"{where}: {error}", f"a row may have {', '.join(sorted(shape.__struct_fields__))}") from None


def one_of(row: Any, names: Sequence[str], where: str) -> Any:
    """What exactly one of these keys gives; DataError when it is none or several."""
    given = [value for value in (getattr(row, name) for name in names) if value is not None]
    if len(given) != 1:
        raise DataError(f"{where}: {len(given)} of {', '.join(names)} are given", "give exactly one of them")
    return given[0]


def read_messages(given: Sequence[ChatMessage], where: str) -> list[Message]:
    try:
        return [to_message(place, message) for place, message in enumerate(given)]
    except RillflowError as error:
        raise DataError(f"{where}: {error.message}", "only text can be learned from") from error


def _as_text(value: Any) -> Any:
    """With the arguments of tool calls as JSON text, as OpenAI has them."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    if not isinstance(value, dict):
        return value
    called = value.get("function")
    if isinstance(called, dict) and isinstance(called.get("arguments"), dict):
        written = json.dumps(called["arguments"], ensure_ascii=False)
        return value | {"function": called | {"arguments": written}}
    return {key: _as_text(item) for key, item in value.items()}
