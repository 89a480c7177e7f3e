"""Tally: look-ups and a sum, a small task in which every single decision is good or bad.

A prompt asks how many of one item lie in several boxes together. The counts are in the payload, which the model never
sees: it has to search for each, and to add them. All counts of one item are different, so a look-up in a wrong box
never pays. An answer has to cite its evidence, `7+5=12`: the count of every box and their sum. A result of a tool alone
is not an answer, and two of the tools (`weigh`, `guess`) do not help. The splits ask for different boxes and items
together; every box and every item is in both.

`demonstrations` shows a planner that can write what the loop reads. It knows the way and does not always take it: with
the chance `mistakes` a step is one of MISTAKES, after which it goes on from where it is. So a policy is learned that a
reward can make better.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from rillflow.agents.agentflow.models import ANSWER, THINK, Decision
from rillflow.agents.agentflow.options import asked
from rillflow.agents.environments.splits import check_split
from rillflow.agents.memory import TaskMemory
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


# Short: a tiny policy learns the rest from the demonstrations.
PROMPTS = {
    "planner": "{question}\n{memory}\n{left} more",
    "final": "{planner}\nanswer",
    "verifier": "{question}\n{memory}\nenough?",
}
MISTAKES = ("another box", "another item", "again", "think", "weigh", "guess", "early")
MAX_STEPS = 6
_SHARE_OF_LOOK_UPS = 0.4  # they are easy to learn; copying what was found is not

Payload = Mapping[str, Any]


def demonstrations(
    split: str, count: int, seed: int, mistakes: float = 0.0, boxes: int = 2
) -> Iterator[dict[str, Any]]:
    """Of sft: `count` single answers of the planner, each behind the prompt that the loop writes."""
    generator, number = random.Random(f"tally lessons/{split}/{seed}"), 0
    for prompt in prompts(split, count, seed, boxes):
        for asked_for, said in _play(prompt["payload"], generator, mistakes):
            if number == count:
                return
            messages = [{"role": "user", "content": asked_for}, {"role": "assistant", "content": said}]
            yield {"id": f"tally-lesson-{split}-{seed}-{number}", "payload": {"messages": messages}}
            number += 1


def _play(payload: Payload, generator: random.Random, mistakes: float) -> Iterator[tuple[str, str]]:
    """The prompts and answers of one episode, without some of those at which a look-up is due."""
    question, memory, found = payload["question"], TaskMemory(), dict[str, str]()
    for left in range(MAX_STEPS, 0, -1):
        best = right(payload, found)
        decision = _mistake(payload, found, generator) if generator.random() < mistakes else best
        if best.action != "search" or generator.random() < _SHARE_OF_LOOK_UPS:
            yield asked(PROMPTS, "planner", question=question, memory=memory.text(), left=left), decision.written()
        if decision.action == ANSWER:
            return
        result = _result(payload, decision)
        found[f"{decision.action} {decision.action_input}"] = result
        memory.note(decision.action, decision.action_input, result)


def right(payload: Payload, found: Mapping[str, str]) -> Decision:
    """Return the next useful decision, given the results `found` by action and input."""
    queries = [f"{box} {payload['item']}" for box in payload["boxes"]]
    for query in queries:
        if f"search {query}" not in found:
            return Decision("find", "search", query)
    total = "+".join(found[f"search {query}"] for query in queries)
    if f"code {total}" not in found:
        return Decision("add", "code", total)
    return Decision("say", ANSWER, f"{total}={found[f'code {total}']}")


def _mistake(payload: Payload, found: Mapping[str, str], generator: random.Random) -> Decision:
    kind, box, item = generator.choice(MISTAKES), generator.choice(payload["boxes"]), payload["item"]
    known = [done.removeprefix("search ") for done in found if done.startswith("search ")]
    elsewhere = f"{generator.choice([one for one in BOXES if one not in payload['boxes']])} {item}"
    others = {
        "another box": elsewhere,
        "another item": f"{box} {generator.choice([one for one in ITEMS if one != item])}",
        "again": generator.choice(known or [elsewhere]),
    }
    if kind in others:
        return Decision("find", "search", others[kind])
    if kind in ("weigh", "guess"):
        return Decision("find", kind, f"{box} {item}")
    if kind == "think":
        return Decision("think", THINK, "more")
    numbers = [value for value in found.values() if value.isdecimal()] or [str(generator.randrange(1, 10))]
    one, other = generator.choice(numbers), generator.choice(numbers)
    return Decision("say", ANSWER, f"{one}+{other}={int(one) + int(other)}")


def _result(payload: Payload, decision: Decision) -> str:
    """Return the result that the executor would give."""
    if decision.action == "code":
        return str(sum(int(number) for number in decision.action_input.split("+")))
    if decision.action in ("search", "weigh"):
        count = look_up(payload, decision.action_input)
        return str(count) if decision.action == "search" else f"{count * 7} g"
    return "some" if decision.action == "guess" else decision.action_input
