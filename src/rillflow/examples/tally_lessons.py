"""Demonstrations of the tally, for a planner that can write what the loop reads.

The planner that is shown knows the way and does not always take it: with the chance `mistakes` a step is one of
MISTAKES, after which it goes on from where it is. So what is learned is a policy that a reward can make better.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.agentflow.options import asked
from rillflow.agents.agentflow.planner import ANSWER, THINK, Decision
from rillflow.agents.memory import TaskMemory
from rillflow.examples import tally
from rillflow.examples.stockroom import BOXES, ITEMS

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
    for prompt in tally.prompts(split, count, seed, boxes):
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
        count = tally.look_up(payload, decision.action_input)
        return str(count) if decision.action == "search" else f"{count * 7} g"
    return "some" if decision.action == "guess" else decision.action_input
