"""What rewards read: the answer that a policy gave, and the right ones that its prompt holds.

Invariant: where there is no answer, the policy failed and earns nothing; where there is no right one to compare with,
the prompt is at fault, and there is no reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rillflow.errors import RewardError

GOLD_KEYS = ("answer", "answers", "golden_answers", "target", "solution")
_MOST = 1 << 16  # characters of a right answer


def text_of(answer: Any) -> str:
    """The answer as text: what a workflow returned, or what a command left (its answer file, else its output)."""
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
    """What the last `<tag>…</tag>` of a text holds, without the space around it; None where there is none."""
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
    """The last number of a text, without commas; None where there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def golds(payload: Mapping[str, Any], key: str | None = None) -> list[str]:
    """The right answers of a prompt, of which each is as good as the others: the one key named, or the usual ones."""
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
