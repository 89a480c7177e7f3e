"""Demonstrations of the tally, for a planner and a verifier that can write what the loop reads.

The planner that is shown knows the way and does not always take it: with the chance `mistakes` a step is one of
MISTAKES, after which it goes on from where it is. So what is learned is a policy that a reward can make better.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.agentflow.actions import ANSWER, THINK, Decision
from rillflow.agents.agentflow.prompts import asked
from rillflow.agents.memory.task import TaskMemory
from rillflow.errors import ToolError
from rillflow.examples import tally
from rillflow.examples.stockroom import BOXES, ITEMS

# Short: a tiny policy learns the rest from the demonstrations.
PROMPTS = {
    "planner": "{question}\n{memory}",
    "final": "{planner}\nanswer",
    "verifier": "{question}\n{memory}\nenough?",
}
MISTAKES = ("another box", "another item", "again", "think", "guess")
MAX_STEPS = 6
_SHARE_OF_VERDICTS = 0.25  # they are easy to learn

Payload = Mapping[str, Any]


def demonstrations(
    split: str, count: int, seed: int, mistakes: float = 0.0, boxes: int = 2
) -> Iterator[dict[str, Any]]:
    """Of sft: `count` single answers of the planner or the verifier, each behind the prompt that the loop writes."""
    generator, number = random.Random(f"tally lessons/{split}/{seed}"), 0
    for prompt in tally.prompts(split, count, seed, boxes):
        for role, asked_for, said in _play(prompt["payload"], generator, mistakes):
            if role == "verifier" and generator.random() >= _SHARE_OF_VERDICTS:
                continue
            if number == count:
                return
            messages = [{"role": "user", "content": asked_for}, {"role": "assistant", "content": said}]
            yield {"id": f"tally-lesson-{split}-{seed}-{number}", "payload": {"messages": messages}}
            number += 1


def _play(payload: Payload, generator: random.Random, mistakes: float) -> Iterator[tuple[str, str, str]]:
    """The roles, prompts and answers of one episode."""
    question, memory, found = payload["question"], TaskMemory(), dict[str, str]()
    for _ in range(MAX_STEPS):
        decision = _mistake(payload, found, generator) if generator.random() < mistakes else _right(payload, found)
        yield "planner", asked(PROMPTS, "planner", question=question, memory=memory.text()), decision.written()
        if decision.action == ANSWER:
            return
        result = _result(payload, decision)
        found[decision.action_input] = result
        memory.note(decision.action, decision.action_input, result)
        enough = result == str(tally.truth(payload))
        verdict = '{"sufficient": true}' if enough else '{"sufficient": false}'
        yield "verifier", asked(PROMPTS, "verifier", question=question, memory=memory.text()), verdict
        if enough:
            final = Decision("say", ANSWER, result)
            yield "planner", asked(PROMPTS, "final", question=question, memory=memory.text()), final.written()
            return


def _right(payload: Payload, found: Mapping[str, str]) -> Decision:
    """What brings the answer nearer, given what was `found` by which input."""
    queries = [f"{box} {payload['item']}" for box in payload["boxes"]]
    for query in queries:
        if query not in found:
            return Decision("find", "search", query)
    if len(queries) == 1:
        return Decision("say", ANSWER, found[queries[0]])
    return Decision("add", "code", "+".join(found[query] for query in queries))


def _mistake(payload: Payload, found: Mapping[str, str], generator: random.Random) -> Decision:
    kind = generator.choice(MISTAKES)
    if kind == "another box":
        box = generator.choice([box for box in BOXES if box not in payload["boxes"]])
        return Decision("find", "search", f"{box} {payload['item']}")
    if kind == "another item":
        item = generator.choice([item for item in ITEMS if item != payload["item"]])
        return Decision("find", "search", f"{payload['boxes'][0]} {item}")
    if kind == "again" and found:
        return Decision("find", "search", generator.choice(sorted(found)))
    if kind == "guess" and (numbers := [value for value in found.values() if value.isdecimal()]):
        return Decision("say", ANSWER, generator.choice(numbers))
    return Decision("think", THINK, "more")


def _result(payload: Payload, decision: Decision) -> str:
    """What the executor would say."""
    if decision.action == "code":
        return str(sum(int(number) for number in decision.action_input.split("+")))
    if decision.action != "search":
        return decision.action_input
    try:
        return tally.look_up(payload, decision.action_input)
    except ToolError as error:
        return f"error: {error.message}"
