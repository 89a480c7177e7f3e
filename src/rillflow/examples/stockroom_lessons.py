"""Rows for supervised training on the stockroom: demonstrations, comparisons of two episodes, labelled steps.

The rows have the formats of `rillflow fit`. The questions are those of `stockroom.prompts`, so the splits share no
(box, item) pair.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.examples import stockroom

Message = dict[str, Any]
Payload = Mapping[str, Any]
_SHARE_RIGHT = 0.5  # of the episodes whose steps are labelled
# The mistakes of wrong episodes, with their relative frequencies.
MISTAKES = {"guess": 4, "no such box": 4, "another box": 1, "another item": 1, "another number": 1}


def demonstrations(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for sft: count the right item in the right box and answer with the number."""
    for prompt in stockroom.prompts(split, count, seed):
        payload = prompt["payload"]
        messages = [_question(payload), *_call(payload, payload["box"], payload["item"]), _answer(_truth(payload))]
        yield {"id": prompt["id"], "payload": {"messages": messages, "tools": stockroom.TOOLS}}


def comparisons(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for reward: a right episode beside one with a mistake."""
    generator = random.Random(f"comparisons/{split}/{seed}")
    for prompt in stockroom.prompts(split, count, seed):
        payload = prompt["payload"]
        right = [*_call(payload, payload["box"], payload["item"]), _answer(_truth(payload))]
        wrong = _play(payload, generator, _mistake(generator))
        row = {
            "messages": [_question(payload)],
            "chosen": right,
            "rejected": [message for step in wrong for message in step],
            "tools": stockroom.TOOLS,
        }
        yield {"id": prompt["id"], "payload": row}


def graded_steps(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for process_reward: a call is labelled 1 if its box and item are right, an answer if its number is."""
    generator = random.Random(f"graded_steps/{split}/{seed}")
    for prompt in stockroom.prompts(split, count, seed):
        payload = prompt["payload"]
        mistake = "" if generator.random() < _SHARE_RIGHT else _mistake(generator)
        *calls, answer = _play(payload, generator, mistake)
        steps = [{"messages": call, "label": float(mistake in ("", "another number"))} for call in calls]
        steps.append({"messages": answer, "label": stockroom.reward(payload, answer[0]["content"])})
        row = {"messages": [_question(payload)], "steps": steps, "tools": stockroom.TOOLS}
        yield {"id": prompt["id"], "payload": row}


def _mistake(generator: random.Random) -> str:
    return generator.choices(list(MISTAKES), list(MISTAKES.values()))[0]


def _play(payload: Payload, generator: random.Random, mistake: str) -> list[list[Message]]:
    """Return the steps of an episode: the call with its result, except for a guess, and the answer."""
    box, item = payload["box"], payload["item"]
    if mistake == "another box":
        box = generator.choice([other for other in stockroom.BOXES if other != box])
    elif mistake == "another item":
        item = generator.choice([other for other in stockroom.ITEMS if other != item])
    elif mistake == "no such box":
        box = item
    said = stockroom.count(payload, {"box": box, "item": item})
    if mistake in ("guess", "no such box", "another number"):
        said = str(generator.choice([other for other in stockroom.COUNTS if str(other) != _truth(payload)]))
    call = [] if mistake == "guess" else [_call(payload, box, item)]
    return [*call, [_answer(said)]]


def _truth(payload: Payload) -> str:
    return str(payload["stock"][payload["box"]][payload["item"]])


def _question(payload: Payload) -> Message:
    return {"role": "user", "content": payload["question"]}


def _call(payload: Payload, box: str, item: str) -> list[Message]:
    arguments = {"box": box, "item": item}
    call = {"id": "call_0", "type": "function", "function": {"name": "count", "arguments": json.dumps(arguments)}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": stockroom.count(payload, arguments)},
    ]


def _answer(said: str) -> Message:
    return {"role": "assistant", "content": said}
