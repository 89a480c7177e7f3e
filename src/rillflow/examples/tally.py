"""Tally: look-ups and a sum, a small task in which every single decision is good or bad.

A prompt asks how many of one item lie in several boxes together. The counts are in the payload, which the model never
sees: it has to search for each, and to add them. All counts of one item are different, so a look-up in a wrong box
never pays. An answer has to cite its evidence, `7+5=12`: the count of every box and their sum. A result of a tool alone
is not an answer, and two of the tools (`weigh`, `guess`) do not help. The splits ask for different boxes and items
together; every box and every item is in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from rillflow.agents.environments.splits import check_split
from rillflow.contracts import Episode
from rillflow.errors import ToolError
from rillflow.examples.stockroom import BOXES, ITEMS

QUESTION = "How many {item} are in {boxes}?"
_COUNTS = range(1, 10)
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
        columns = {item: dict(zip(BOXES, generator.sample(_COUNTS, len(BOXES)), strict=True)) for item in ITEMS}
        payload = {
            "question": QUESTION.format(item=item, boxes=" and ".join(f"the {box} box" for box in asked)),
            "boxes": list(asked),
            "item": item,
            "stock": {box: {item: columns[item][box] for item in ITEMS} for box in BOXES},
        }
        yield {"id": f"tally-{split}-{boxes}-{seed}-{index}", "payload": payload}


def look_up(payload: Mapping[str, Any], query: str) -> int:
    """Return the count for a query like `red pens`. A wrong query raises a ToolError, which the model reads."""
    box, _, item = query.strip().partition(" ")
    shelf = payload["stock"].get(box)
    if shelf is None:
        raise ToolError(f"no {box[:40]} box")
    if item not in shelf:
        raise ToolError(f"no {item[:40]} in the {box} box")
    return int(shelf[item])


async def search(query: str, episode: Episode) -> str:
    """Count one item in one box.

    Args:
        query: a box and an item, such as `red pens`
    """
    return str(look_up(episode.payload, query))


async def code(expression: str) -> str:
    """Add whole numbers, such as `12+30`."""
    if not _SUM.fullmatch(expression):
        raise ToolError("only sums can be computed, such as 12+30")
    return str(sum(int(number) for number in _NUMBER.findall(expression)))


async def weigh(query: str, episode: Episode) -> str:
    """Weigh one item in one box, in grams.

    Args:
        query: a box and an item, such as `red pens`
    """
    return f"{look_up(episode.payload, query) * 7} g"


async def guess(query: str) -> str:
    """Guess how many there are.

    Args:
        query: anything
    """
    return "some"


def answer(payload: Mapping[str, Any]) -> str:
    """The answer that is paid: the counts of the boxes, as they were asked for, and their sum."""
    counts = [int(payload["stock"][box][payload["item"]]) for box in payload["boxes"]]
    return f"{'+'.join(map(str, counts))}={sum(counts)}"


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """1.0 if the answer cites the count of every box, in any order, and their sum; else 0.0."""
    cited, _, total = "".join((answer or "").split()).partition("=")
    counts = [int(payload["stock"][box][payload["item"]]) for box in payload["boxes"]]
    right = sorted(cited.split("+")) == sorted(map(str, counts))
    return float(right and total == str(sum(counts)))
