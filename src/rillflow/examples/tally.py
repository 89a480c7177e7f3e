"""Tally: look-ups and a sum, the smallest task that a planner has to plan for.

A prompt asks how many of one item lie in one box, or in two. The counts are in the payload, which the model never
sees: it has to search for each, and to add where there are two. All counts of one stock are different, so a wrong
look-up never pays. The splits ask for different (boxes, item) pairs or triples; every box and every item is in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from rillflow.agents.environments.world import check_split
from rillflow.contracts import Episode
from rillflow.errors import ToolError
from rillflow.examples.stockroom import BOXES, ITEMS

QUESTION = "How many {item} are in {boxes}?"
_COUNTS = range(10, 100)
_SUM = re.compile(r"\s*[0-9]{1,6}(\s*\+\s*[0-9]{1,6}){0,15}\s*")
_NUMBER = re.compile(r"[0-9]+")


def choices(split: str, boxes: int) -> list[tuple[tuple[str, ...], str]]:
    """The boxes and the item that `split` may ask for: a quarter of all is held out."""
    check_split(split)
    return [
        (tuple(BOXES[place] for place in places), item)
        for places in permutations(range(len(BOXES)), boxes)
        for column, item in enumerate(ITEMS)
        if ((sum(places) + column) % 4 == 0) == (split == "heldout")
    ]


def prompts(split: str, count: int, seed: int, boxes: int = 2) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`; the same arguments always give the same prompts."""
    known, generator = choices(split, boxes), random.Random(f"tally/{split}/{seed}/{boxes}")
    for index in range(count):
        asked, item = generator.choice(known)
        counts = iter(generator.sample(_COUNTS, len(BOXES) * len(ITEMS)))
        payload = {
            "question": QUESTION.format(item=item, boxes=" and ".join(f"the {box} box" for box in asked)),
            "boxes": list(asked),
            "item": item,
            "stock": {box: {item: next(counts) for item in ITEMS} for box in BOXES},
        }
        yield {"id": f"tally-{split}-{boxes}-{seed}-{index}", "payload": payload}


def look_up(payload: Mapping[str, Any], query: str) -> str:
    """The count for a query like `red pens`; what is wrong with it is a ToolError, for the model to read."""
    box, _, item = query.strip().partition(" ")
    shelf = payload["stock"].get(box)
    if shelf is None:
        raise ToolError(f"no {box[:40]} box")
    if item not in shelf:
        raise ToolError(f"no {item[:40]} in the {box} box")
    return str(shelf[item])


async def search(query: str, episode: Episode) -> str:
    """Count one item in one box.

    Args:
        query: a box and an item, such as `red pens`
    """
    return look_up(episode.payload, query)


async def code(expression: str) -> str:
    """Add whole numbers, such as `12+30`."""
    if not _SUM.fullmatch(expression):
        raise ToolError("only sums can be computed, such as 12+30")
    return str(sum(int(number) for number in _NUMBER.findall(expression)))


def truth(payload: Mapping[str, Any]) -> int:
    return sum(int(payload["stock"][box][payload["item"]]) for box in payload["boxes"])


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """1.0 if the last number of the answer is the sum, else 0.0."""
    numbers = _NUMBER.findall(answer or "")
    return float(bool(numbers) and numbers[-1] == str(truth(payload)))
