"""What the shipped rewards share: their base class, the answer as text, and the right answers of a prompt.

Invariant: an answer that is missing or malformed is the policy's fault and earns nothing. A prompt without a right
answer is at fault itself: that is a RewardError and no reward.
"""

from __future__ import annotations

import importlib.util
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rillflow.config.base import Section
from rillflow.errors import ConfigError, RewardError

GOLD_KEYS = ("answer", "answers", "golden_answers", "target", "solution")
_MOST = 1 << 16  # characters of a right answer


class ShippedReward(Section):
    """A reward whose fields are its options, checked before a run starts.

    Calling it returns a finite number, or raises RewardError if none could be computed; 0 never stands for a failure.
    """

    async def prepare(self) -> None:
        """Prepare what takes longer than a reward may take; called once, before the first."""

    @abstractmethod
    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Return the reward of an answer to the prompt with this payload."""


def need(package: str, extra: str) -> None:
    """Raise ConfigError if an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed", f"pip install 'rillflow[{extra}]'")


def text_of(answer: Any) -> str:
    """Return the answer as text: what a workflow returned, or a command's answer file, or else its output."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float):
        return str(answer)
    if isinstance(answer, Mapping) and "stdout" in answer:
        return text_of(answer["answer"] if answer.get("answer") is not None else answer["stdout"])
    raise RewardError(
        f"the answer is {type(answer).__name__}, not text",
        "let the workflow return its final answer as text, or write the reward as a function of your own",
    )


def inside(text: str, tag: str) -> str | None:
    """Return the stripped content of the last `<tag>…</tag>` of a text, or None if it has no such tag."""
    opened, closed = f"<{tag}>", f"</{tag}>"
    held, start = None, text.find(opened)
    while start >= 0:
        end = text.find(closed, start + len(opened))
        if end < 0:
            break
        held = text[start + len(opened) : end]
        start = text.find(opened, end + len(closed))
    return held if held is None else held.strip()


def last_number(text: str) -> str | None:
    """Return the last number of a text, without commas, or None if it has no number."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def golds(payload: Mapping[str, Any], key: str | None = None) -> list[str]:
    """Return the right answers of a prompt, under `key` or under the usual names. Each is as good as the others."""
    keys = GOLD_KEYS if key is None else (key,)
    found = next((payload[each] for each in keys if payload.get(each) is not None), None)
    several = found if isinstance(found, list) else [found]
    texts = [str(one) for one in several if isinstance(one, str | int | float)]
    if not texts:
        raise RewardError(
            f"the prompt has no right answer under {' or '.join(keys)}",
            "name its key: `{NAME: {key: …}}` in the recipe",
        )
    if max(map(len, texts)) > _MOST:
        raise RewardError(f"a right answer of the prompt is longer than {_MOST} characters", "name another key")
    return texts
