"""Rewards of an answer's text: `exact_match`, `f1`, `format` and `length`, and the graded `math` and `reasoning_gym`.

Short answers are normalised as in SQuAD's evaluation.

A grader computes in a worker process. One that hangs is killed, and no other episode waits for it. A grade is the
number that the grader returned. A grader that hung, died or raised is a RewardError and never a grade.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.agents.processes import Pool, Seat, WorkerFailed, WorkerLost
from rillflow.agents.rewards.base import ShippedReward, golds, inside, last_number, need, text_of
from rillflow.agents.rewards.graders import LOAD, OUT_OF_TIME
from rillflow.config.base import Positive, Seconds
from rillflow.errors import RewardError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class _ShortAnswer(ShippedReward):
    """The options of both rewards."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a list of them")
    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")

    def _taken(self, answer: Any) -> str | None:
        text = text_of(answer)
        return text if self.inside is None else inside(text, self.inside)


class ExactMatch(_ShortAnswer):
    """1 if the answer is one of the prompt's right ones (case, punctuation and articles do not count), else 0."""

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Compare the answer with each right one."""
        right, taken = golds(payload, self.key), self._taken(answer)
        return 0.0 if not taken else exact(taken, right)


class F1(_ShortAnswer):
    """0 to 1: F1 of the words that the answer shares with the prompt's right one, the best of several."""

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Compare the answer's words with those of each right one."""
        right, taken = golds(payload, self.key), self._taken(answer)
        return 0.0 if not taken else f1(taken, right)


def normalised(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", _bare(text)).split())


def exact(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer is one of the right ones, else 0.0."""
    return float(any(said == right for said, right in _compared(answer, golds)))


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return the F1 of the words that the answer shares with a right one; the best of several counts."""
    return max(_f1(said.split(), right.split()) for said, right in _compared(answer, golds))


def _compared(answer: str, golds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the answer and each right one in the form in which they are compared.

    That is the normalised form; with articles if the right one consists of articles (the choice "A"); unchanged if it
    consists of punctuation. Otherwise every answer that normalises to nothing would be right.
    """
    for gold in golds:
        form = next((form for form in (normalised, _bare) if form(gold)), _as_it_is)
        yield form(answer), form(gold)


def _bare(text: str) -> str:
    return text.lower().translate(_PUNCTUATION).strip()


def _as_it_is(text: str) -> str:
    return text.strip().casefold()


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:  # a right answer may be empty
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold))


_MOST = 1 << 17  # characters of an answer; a longer one has no form


class Format(ShippedReward):
    """1 if the answer has the wanted form, else 0: `pattern`, `tags` or `json_keys`."""

    pattern: str | None = Field(None, description="a regular expression that the whole answer matches")
    tags: list[str] | None = Field(
        None, min_length=1, description="<TAG>…</TAG> for each, once, in this order, and nothing but space between them"
    )
    json_keys: list[str] | None = Field(None, description="the answer is a JSON object that has these keys; may be []")
    seconds: Seconds = Field(
        5.0, description="of computing that matching `pattern` may take; beyond that there is no reward"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _one(self) -> Format:
        if sum(given is not None for given in (self.pattern, self.tags, self.json_keys)) != 1:
            raise ValueError("give exactly one of `pattern`, `tags` and `json_keys`")
        return self

    async def prepare(self) -> None:
        if self.pattern is not None:
            await prepare("pattern")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        said = text_of(answer).strip()
        if len(said) > _MOST:
            return 0.0
        if self.pattern is not None:
            return await grade("pattern", self.seconds, pattern=self.pattern, text=said)
        return float(_has_tags(said, self.tags) if self.tags is not None else _has_keys(said, self.json_keys or []))


class Length(ShippedReward):
    """0 to -1: nothing up to `longest` - `margin`, then falling evenly to -1 at `longest` (DAPO's shape).

    It measures the text that the workflow returned. `trainer.overlong` does the same to all tokens of a sample.
    """

    longest: Positive = Field(description="an answer of this length, or longer, gets -1")
    margin: Positive = Field(description="how much below that the punishment begins")
    unit: Literal["words", "characters", "tokens"] = "words"
    model: str | None = Field(None, description="folder of the model whose tokens are counted, for unit tokens")

    @model_validator(mode="after")
    def _fits(self) -> Length:
        if self.margin > self.longest:
            raise ValueError("`margin` is more than `longest`: every answer would be punished")
        if (self.unit == "tokens") != (self.model is not None):
            raise ValueError("`model` goes with `unit: tokens`, which needs it")
        if self.model is not None and not (Path(self.model) / "tokenizer.json").is_file():
            raise ValueError(f"there is no tokenizer.json in {self.model}")
        return self

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        over = self._measure(text_of(answer)) - (self.longest - self.margin)
        return -min(max(over / self.margin, 0.0), 1.0)

    def _measure(self, text: str) -> int:
        if self.unit == "tokens":
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return len(text.split()) if self.unit == "words" else len(text)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(Path(self.model or "") / "tokenizer.json"))


def _has_tags(text: str, tags: list[str]) -> bool:
    """Return whether the text is these tags in this order, none of them inside another."""
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if not text.startswith(opened):
            return False
        held, found, text = text.removeprefix(opened).partition(closed)
        if not found or any(f"<{each}>" in held or f"</{each}>" in held for each in tags):
            return False
        text = text.lstrip()
    return not text


def _has_keys(text: str, keys: list[str]) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(key in found for key in keys)


# ---------------------------------------------------------------- graded in a worker process

_LOAD_SECONDS = 300.0  # for a process to start and to load a grader
_WAIT_SECONDS = 120.0  # for a free process
_SLOWER = 4.0  # wall time of a grading over its computing time, on a busy machine
_TRIES = 2  # a process that died is replaced once


def new_pool(size: int) -> Pool:
    """Return a pool of at most `size` graders."""
    command = ["rillflow.agents.rewards.graders:start"]
    return Pool("a grader", command, workers=size, idle=None, start_seconds=_LOAD_SECONDS)


@cache
def shared_pool() -> Pool:
    """Return the pool of this process. Two graders are enough for hundreds of answers a second."""
    return new_pool(max(2, min(8, (os.cpu_count() or 2) // 2)))


async def prepare(name: str) -> None:
    """Start all graders and let them load what they need, which takes longer than an answer may take."""
    pool = shared_pool()
    await asyncio.gather(*(_asked(pool, name, LOAD, {}) for _ in range(pool.size)))


async def grade(name: str, seconds: float, **arguments: Any) -> float:
    """Return the grade by the grader `name`, which may compute for `seconds`."""
    return await _asked(shared_pool(), name, seconds, arguments)


async def _asked(pool: Pool, name: str, seconds: float, arguments: dict[str, Any]) -> float:
    for _ in range(_TRIES):
        try:
            seat = await pool.take(_WAIT_SECONDS)
        except TimeoutError as error:
            raise RewardError(str(error), "lower `rollout.episodes`") from None
        try:
            return await _grade(seat, name, seconds, arguments)
        except WorkerFailed as error:
            raise RewardError(f"grading by {name}: {error}") from None
        except WorkerLost as error:
            if seconds == LOAD and error.late:
                raise RewardError(f"loading the grader {name} took longer than {_LOAD_SECONDS:g} s") from None
            if error.late or error.code == -OUT_OF_TIME:
                raise RewardError(
                    f"grading by {name} took longer than {seconds:g} s", "raise the reward's `seconds` in the recipe"
                ) from None
        finally:
            seat.give_back()
    raise RewardError(
        f"grading by {name}: its process died {_TRIES} times", "it may need more memory than the limit allows"
    )


async def _grade(seat: Seat, name: str, seconds: float, arguments: dict[str, Any]) -> float:
    """Let the process load the grader first if it has not: loading does not count as grading."""
    question = {"name": name, "arguments": arguments}
    if name not in seat.worker.known:
        await seat.call({**question, "seconds": LOAD}, _LOAD_SECONDS)
        seat.worker.known.add(name)
    if seconds == LOAD:
        return 0.0
    value: float = await seat.call({**question, "seconds": seconds}, seconds * _SLOWER)
    return value


_MATH_TAIL = 4096  # characters at the end of an answer, where its result is
_GYM_MOST = 1 << 16  # characters of an answer


class Math(ShippedReward):
    """1 if the answer means the same number or expression as the prompt's (math-verify), else 0."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a solution that ends so")
    boxed: bool = Field(False, description="only what stands in \\boxed{…} counts")
    seconds: Seconds = Field(5.0, description="of computing that comparing may take; beyond that there is no reward")

    def model_post_init(self, context: Any) -> None:
        need("math_verify", "math")

    async def prepare(self) -> None:
        await prepare("math")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Compare the end of the answer with each right one."""
        right, said = golds(payload, self.key), text_of(answer)[-_MATH_TAIL:]
        if not said.strip():
            return 0.0
        for gold in right:
            if await grade("math", self.seconds, gold=gold, answer=said, boxed=self.boxed):
                return 1.0
        return 0.0


class ReasoningGym(ShippedReward):
    """0 to 1: what the scorer of the reasoning-gym task says that the prompt is from."""

    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")
    last_number: bool = Field(False, description="only the last number of the answer counts")
    strict: bool = Field(
        False, description="full marks or 0: many tasks give some for a right answer among other words"
    )
    seconds: Seconds = Field(5.0, description="of computing that scoring may take; beyond that there is no reward")

    def model_post_init(self, context: Any) -> None:
        need("reasoning_gym", "reasoning-gym")

    async def prepare(self) -> None:
        await prepare("reasoning_gym")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Score the answer by the dataset's own scorer."""
        lacking = [key for key in ("answer", "metadata", "source_dataset") if key not in payload]
        if lacking:
            raise RewardError(
                f"not a reasoning-gym prompt: `{lacking[0]}` is missing from its payload",
                "take prompts from `data.prompts: {reasoning_gym: …}`",
            )
        said = text_of(answer)[:_GYM_MOST]
        taken = said.strip() if self.inside is None else inside(said, self.inside)
        if self.last_number:
            taken = last_number(taken or "")
        if not taken:
            return 0.0
        score = await grade("reasoning_gym", self.seconds, entry=dict(payload), answer=taken)
        return float(score >= 1.0) if self.strict else score
