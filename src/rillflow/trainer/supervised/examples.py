"""The rows of supervised training: their accepted shapes, and a source's rows as tokens and databuffers.

A row that fits no shape is refused with the name of its key. Unknown keys are ignored: datasets have more columns than
a task needs. Messages have OpenAI's form; arguments of tool calls may be JSON text or, as in many datasets, an object.

A group holds the training rows of one row of the source: the row itself, the rows of a conversation that its template
rewrites, or the two rows of a pair.

Invariants: every row of a source is read before training begins, and an unusable row is an error that names it; groups
that are too long are left out as a whole, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

from rillflow.config.supervised import FitRecipe, Task
from rillflow.contracts import PromptSource
from rillflow.errors import DataError, RillflowError
from rillflow.gateway.dialects.chat import ChatMessage, to_message
from rillflow.gateway.trees.messages import Message, message
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.supervised.texts import Saying, Writer, Written

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Ints

    Column = npt.NDArray[Any]


# Text is used as it is; messages are written by the chat template.
Said = str | list[ChatMessage]
Tools = list[dict[str, Any]]
Label = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Demonstration(msgspec.Struct):
    """A row of `sft`: a conversation, or a prompt and its completion."""

    messages: list[ChatMessage] | None = None
    prompt: Said | None = None
    completion: Said | None = None
    tools: Tools | None = None


class Answered(msgspec.Struct, kw_only=True):
    """A row for a trained reward model: an answer and its question."""

    answer: Said
    prompt: Said | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None


class Pair(msgspec.Struct, kw_only=True):
    """A row of `reward`: two answers to one question, the first of which is better, by `margin` if that is known."""

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
    """A step with its quality, from 0 to 1."""

    label: Label


class Stepwise(msgspec.Struct, kw_only=True):
    """A row for a trained process reward model: a question and the steps towards its answer."""

    steps: Sequence[Step]
    prompt: Said | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None


class LabelledSteps(Stepwise, kw_only=True):
    """A row of `process_reward`."""

    steps: list[LabelledStep]


Shape = TypeVar("Shape", bound=msgspec.Struct)


def read_row(payload: Mapping[str, Any], shape: type[Shape], where: str) -> Shape:
    """Return the row; DataError, with its place `where`, if it does not have this shape."""
    try:
        return msgspec.convert(_as_text(dict(payload)), shape)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DataError(f"{where}: {error}", f"a row may have {', '.join(sorted(shape.__struct_fields__))}") from None


def one_of(row: Any, names: Sequence[str], where: str) -> Any:
    """Return the value of the only key that is given; DataError if none or several are."""
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
    """Convert the arguments of tool calls to JSON text, OpenAI's form."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    if not isinstance(value, dict):
        return value
    called = value.get("function")
    if isinstance(called, dict) and isinstance(called.get("arguments"), dict):
        written = json.dumps(called["arguments"], ensure_ascii=False)
        return value | {"function": called | {"arguments": written}}
    return {key: _as_text(item) for key, item in value.items()}


# ---------------------------------------------------------------- groups of rows as tokens


SEPARATOR = "\n"


@dataclass(frozen=True)
class Example:
    """A group: its rows, and one value of each column for every row (`…_R`) or marked token (`…_N`)."""

    rows: Sequence[Written]
    columns: dict[str, Column] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class Examples:
    """All groups of a source that can be used; `left_out` were too long."""

    groups: Sequence[Example]
    left_out: int

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def lengths(self) -> Ints:
        """Tokens of each group."""
        return np.array([group.tokens for group in self.groups], dtype=np.int64)

    def take(self, wanted: Sequence[int]) -> Databuffer:
        """Return the rows of these groups; a row's member is its group's number here, the same on every rank."""
        groups = [self.groups[index] for index in wanted]
        return _databuffer(groups, np.array(wanted, dtype=np.int64), self.groups[0].columns)


def read_examples(source: PromptSource, origin: str, recipe: FitRecipe, writer: Writer, longest: int) -> Examples:
    """Read every row of the source; DataError for the first that cannot be used."""
    read = _READERS[recipe.task]
    groups: list[Example] = []
    for index in range(source.length):
        prompt = source.at(index)
        group = read(prompt.payload, recipe, writer, f"{origin}: row {prompt.id}")
        if all(len(row.tokens) <= longest for row in group.rows):
            groups.append(group)
    if not groups:
        raise DataError(f"every row of {origin} has more than {longest} tokens", "raise data.longest, or cut the rows")
    return Examples(groups, source.length - len(groups))


# ---------------------------------------------------------------- one row of each task


def _demonstration(payload: Any, recipe: FitRecipe, writer: Writer, where: str) -> Example:
    row = read_row(payload, Demonstration, where)
    if isinstance(row.prompt, str) and isinstance(row.completion, str) and row.messages is None:
        rows = [writer.completion(row.prompt, row.completion)]
    else:
        last = recipe.train_on == "last" or row.messages is None
        rows = writer.conversation(_conversation(row, where), row.tools, last=last, where=where)
    for written in rows:
        written.marked = [place for place in written.marked if place > 0]  # the first token has no context
    if not any(written.marked for written in rows):
        raise DataError(f"{where}: it has nothing to learn", "give an answer of at least one token")
    return Example(rows)


def _conversation(row: Demonstration, where: str) -> list[Message]:
    if row.messages is not None:
        if row.prompt is not None or row.completion is not None:
            raise DataError(f"{where}: it has messages and a prompt or completion", "give one or the other")
        return read_messages(row.messages, where)
    if row.prompt is None or row.completion is None:
        raise DataError(f"{where}: it has neither messages nor prompt and completion", "give one or the other")
    return [*_said(row.prompt, where, "user"), *_said(row.completion, where, "assistant")]


def _pair(payload: Any, recipe: FitRecipe, writer: Writer, where: str) -> Example:
    row = read_row(payload, Pair, where)
    rows = [
        write_answer(Answered(answer=answer, prompt=row.prompt, messages=row.messages, tools=row.tools), writer, where)
        for answer in (row.chosen, row.rejected)
    ]
    if rows[0].tokens == rows[1].tokens:
        raise DataError(f"{where}: chosen and rejected are the same", "remove the row: it teaches nothing")
    return Example(rows, {"chosen_R": np.array([True, False]), "margin_R": np.full(2, row.margin)})


def _labelled(payload: Any, recipe: FitRecipe, writer: Writer, where: str) -> Example:
    row = read_row(payload, LabelledSteps, where)
    written = write_steps(row, writer, SEPARATOR if recipe.separator is None else recipe.separator, where)
    labels = np.array([step.label for step in row.steps], np.float32)
    return Example([written], {"label_N": labels, "state_N": _states(written)})


def _states(row: Written) -> Column:
    """Return a number for each step of a row: steps that follow the same tokens have the same number."""
    begins = [row.begun, *(end + 1 for end in row.marked[:-1])]
    digests = (blake2b(np.array(row.tokens[:begin], "<i4").tobytes(), digest_size=6) for begin in begins)
    return np.array([int.from_bytes(digest.digest()) for digest in digests], np.float64)


def write_answer(row: Answered, writer: Writer, where: str) -> Written:
    """Write the text that a reward model scores, in training and in use."""
    if row.prompt is not None and row.messages is not None:
        raise DataError(f"{where}: it has both a prompt and messages", "give one of them")
    asked = row.messages if row.prompt is None else row.prompt
    return writer.scored(None if asked is None else _saying(asked, where), _saying(row.answer, where), row.tools, where)


def write_steps(row: Stepwise, writer: Writer, separator: str, where: str) -> Written:
    """Write the text whose steps a process reward model scores, in training and in use."""
    if not row.steps:
        raise DataError(f"{where}: it has no steps", "give at least one")
    prompt = _saying(one_of(row, ("prompt", "text", "messages"), where), where)
    steps = [
        _saying(one_of(step, ("text", "messages"), f"{where}: step {number}"), where)
        for number, step in enumerate(row.steps)
    ]
    return writer.steps(prompt, steps, row.tools, separator, where)


def _saying(said: Said, where: str) -> Saying:
    return said if isinstance(said, str) else read_messages(said, where)


def _said(said: Said, where: str, role: str) -> list[Message]:
    return [message(role, said)] if isinstance(said, str) else read_messages(said, where)


_READERS: dict[Task, Callable[[Any, FitRecipe, Writer, str], Example]] = {
    "sft": _demonstration,
    "reward": _pair,
    "process_reward": _labelled,
}


# ---------------------------------------------------------------- arrays


def _databuffer(groups: Sequence[Example], member_G: Ints, like: Mapping[str, Column]) -> Databuffer:
    """Build a databuffer of these groups, perhaps none. `like` has the columns of every group."""
    written = [row for group in groups for row in group.rows]
    rows_G = np.array([len(group.rows) for group in groups], dtype=np.int64)
    length_R = np.array([len(row.tokens) for row in written], dtype=np.int64)
    start_R = np.cumsum(length_R) - length_R
    count, total = len(written), int(length_R.sum())
    marked = np.array(
        [start + place for row, start in zip(written, start_R.tolist(), strict=True) for place in row.marked], np.int64
    )
    mask_N = np.zeros(total, np.bool_)
    mask_N[marked] = True
    rows = Rows(
        tokens_N=np.array([token for row in written for token in row.tokens], np.int32),
        mask_N=mask_N,
        old_N=np.zeros(total, np.float32),
        temperature_N=np.ones(total, np.float32),
        fresh_N=np.zeros(total, np.bool_),
        start_R=start_R,
        length_R=length_R,
        reward_R=np.zeros(count),
        group_mean_R=np.zeros(count),
        group_std_R=np.zeros(count),
        group_size_R=np.repeat(rows_G, rows_G),
        staleness_R=np.zeros(count, np.int64),
        truncated_R=np.zeros(count, np.bool_),
        replayed_R=np.zeros(count, np.bool_),
        member_R=np.repeat(member_G, rows_G),
        alike_R=np.zeros(count, np.int64),
        step_reward_N=np.full(total, np.nan, np.float32),
        kept_R=np.zeros(count, np.int64),
    )
    made: dict[str, Column] = {}
    for name, empty in like.items():
        values = np.concatenate([empty[:0], *(group.columns[name] for group in groups)])
        if name.endswith("_N"):
            made[name] = np.zeros(total, values.dtype)
            made[name][marked] = values
        else:
            made[name] = values
    return Databuffer(rows).adding(made)
