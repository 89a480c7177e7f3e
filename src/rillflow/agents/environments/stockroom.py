"""The stockroom: a question whose answer can only be had by calling a tool and reading what it says.

A prompt asks how many of one item lie in one box. The counts are in the payload, which the model never
sees; the only road to a right answer is to call `count` with the box and the item that were asked for.

Invariants:

* All counts of one stock are different, so opening a wrong box or counting a wrong item never pays.
* The splits ask for different (box, item) pairs, while every box and every item occurs in both: the
  held-out questions are new, their words are not.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

    from rillflow.types import FinishedEpisode

BOXES = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")
ITEMS = ("pens", "cups", "books", "keys", "coins", "socks", "nails", "balls")
COUNTS = range(10, 100)
QUESTIONS = ("How many {item} are in the {box} box?", "In the {box} box, how many {item}?")
SPLITS = ("train", "heldout")

TOOLS: list[ChatCompletionFunctionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count the pieces of one item in one box.",
            "parameters": {
                "type": "object",
                "properties": {"box": {"type": "string"}, "item": {"type": "string"}},
                "required": ["box", "item"],
            },
        },
    }
]


def pairs(split: str) -> list[tuple[str, str]]:
    """Return the (box, item) pairs that `split` may ask for.

    The rule is a Latin-square pattern: a quarter of the pairs is held out, the same share of every row and
    of every column.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    return [
        (box, item)
        for row, box in enumerate(BOXES)
        for column, item in enumerate(ITEMS)
        if ((row + column) % 4 == 0) == (split == "heldout")
    ]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` JSON-serialisable prompts of `split`; the same arguments always give the same prompts."""
    choices = pairs(split)
    generator = random.Random(f"stockroom/{split}/{seed}")
    for index in range(count):
        box, item = generator.choice(choices)
        payload = {
            "question": generator.choice(QUESTIONS).format(box=box, item=item),
            "box": box,
            "item": item,
            "stock": _fill(generator),
        }
        yield {"id": f"stockroom-{split}-{seed}-{index}", "payload": payload}


def _fill(generator: random.Random) -> dict[str, dict[str, int]]:
    counts = iter(generator.sample(COUNTS, len(BOXES) * len(ITEMS)))
    return {box: {item: next(counts) for item in ITEMS} for box in BOXES}


def count(payload: Mapping[str, Any], arguments: str | Mapping[str, Any]) -> str:
    """Answer one call of the tool; `arguments` is the model's JSON text or the mapping parsed from it.

    The model writes the arguments, so anything may be in them. What is wrong with them is said in the
    answer, where the model can read it, and never raised.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "error: the arguments are not JSON"
    if not isinstance(arguments, Mapping):
        return "error: the arguments are not an object"
    box, item = arguments.get("box"), arguments.get("item")
    if not isinstance(box, str) or not isinstance(item, str):
        return "error: box and item must be strings"
    shelf = payload["stock"].get(box)
    if shelf is None:
        return f"error: no {box} box"
    if item not in shelf:
        return f"error: no {item} in the {box} box"
    return str(shelf[item])


def command_reward(payload: Mapping[str, Any], left: Mapping[str, Any]) -> float:
    """`reward` for an agent that is a command: of all that it left, what it wrote as its answer counts."""
    return reward(payload, left["answer"])


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """Return 1.0 if the last number in `answer` is the count that was asked for, else 0.0.

    Only the last number counts, so a list of guesses is worth no more than one guess.
    """
    numbers = re.findall(r"-?[0-9]+", answer or "")
    if not numbers:
        return 0.0
    # Compared as text: int() refuses very long digit strings, and a model may well write one.
    return float(numbers[-1] == str(payload["stock"][payload["box"]][payload["item"]]))


def brief(group: Sequence[FinishedEpisode]) -> list[float]:
    """Rank the right answers of a group by their length: the reward of each is the share of the others that are longer.

    A wrong answer earns nothing, however short it is.
    """
    lengths = [len(episode.answer or "") if episode.reward > 0 else None for episode in group]
    right = [length for length in lengths if length is not None]
    return [
        0.0 if length is None else sum(other > length for other in right) / max(len(right) - 1, 1) for length in lengths
    ]
