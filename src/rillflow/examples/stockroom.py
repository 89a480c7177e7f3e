"""The stockroom: a question that can only be answered by calling a tool and reading its result.

A prompt asks how many of one item are in one box. The counts are in the payload, which the model never sees; it has to
call `count` with the box and the item of the question.

Three workflows play the task: `play` with one policy, `play_checked` with a second policy that judges the answer, and
`play_shared` with two agents that share one policy. `demonstrations`, `comparisons` of two episodes and `graded_steps`
make rows for `rillflow fit`.

Invariants:

* All counts of one stock are different, so a count of another box or item is never right.
* The splits ask for different (box, item) pairs; every box and every item occurs in both. The held-out questions are
  new, their words are not.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rillflow.agents.environments.splits import check_split, held_out

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

    from rillflow.contracts import Episode
    from rillflow.types import FinishedEpisode

BOXES = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")
ITEMS = ("pens", "cups", "books", "keys", "coins", "socks", "nails", "balls")
COUNTS = range(10, 100)
QUESTIONS = ("How many {item} are in the {box} box?", "In the {box} box, how many {item}?")
MAX_TURNS = 3
# The shipped policy has learned to answer questions that end like this one with yes or no.
VERDICT = "{question} {answer}. Is it right?"

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
    """Return the (box, item) pairs of `split`; a quarter of each row and column is held out."""
    check_split(split)
    return [
        (box, item)
        for row, box in enumerate(BOXES)
        for column, item in enumerate(ITEMS)
        if held_out(row, column) == (split == "heldout")
    ]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` JSON-serialisable prompts of `split`."""
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

    Bad arguments are described in the answer, which the model reads. They never raise.
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


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """Return 1.0 if the last number in `answer` is the right count, else 0.0.

    Only the last number counts, so a list of guesses is worth no more than one guess.
    """
    numbers = re.findall(r"-?[0-9]+", answer or "")
    if not numbers:
        return 0.0
    # Compared as text, because int() refuses very long digit strings and a model may write one.
    return float(numbers[-1] == str(payload["stock"][payload["box"]][payload["item"]]))


def command_reward(payload: Mapping[str, Any], left: Mapping[str, Any]) -> float:
    """Return the reward of an agent that is a command; `left` holds the files and output that it left."""
    return reward(payload, left["answer"])


def brief(group: Sequence[FinishedEpisode]) -> list[float]:
    """Rank the right answers of a group by length: each earns the share of the other right answers that are longer.

    A wrong answer earns 0.
    """
    lengths = [len(episode.answer or "") if episode.reward > 0 else None for episode in group]
    right = [length for length in lengths if length is not None]
    return [
        0.0 if length is None else sum(other > length for other in right) / max(len(right) - 1, 1) for length in lengths
    ]


# Workflows


async def play(episode: Episode) -> str | None:
    """Ask the question, serve the tool calls, and return the final answer. None means that no answer came."""
    messages: list[Any] = [{"role": "user", "content": episode.payload["question"]}]
    for _ in range(MAX_TURNS):
        response = await episode.client.chat.completions.create(
            model=episode.model, messages=messages, tools=TOOLS, max_tokens=32
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _serve(episode.payload, call)})
    return None


async def play_checked(episode: Episode) -> dict[str, float]:
    """Let the run's first policy answer and its second judge the answer; return the rewards of both.

    The second policy is rewarded for a verdict that fits, whether the answer was right or wrong.
    """
    solver, checker = episode.policies
    answer = await play(episode)
    verdict = await episode.client.chat.completions.create(
        model=checker, messages=[{"role": "user", "content": _asked_to_check(episode, answer)}], max_tokens=4
    )
    solved = reward(episode.payload, answer)
    return {solver: solved, checker: judged(verdict.choices[0].message.content, right=solved == 1.0)}


async def play_shared(episode: Episode) -> float:
    """Let two agents of one policy play: one answers, the other judges; return the first one's reward.

    Each answer is a leaf with its own reward and its agent's name. With `dataflow.grouping: agent` verdicts are
    compared with verdicts and solutions with solutions.
    """
    answer = await play(episode)
    verdict = await episode.agent("checker").chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": _asked_to_check(episode, answer)}], max_tokens=4
    )
    solved = reward(episode.payload, answer)
    episode.reward(solved, leaf=0)
    episode.reward(judged(verdict.choices[0].message.content, right=solved == 1.0), leaf=1)
    return solved


def judged(verdict: str | None, *, right: bool) -> float:
    """Return 1.0 if the verdict is `yes` on a right answer or `no` on a wrong one, else 0.0."""
    return float((verdict or "").strip().lower() == ("yes" if right else "no"))


def _asked_to_check(episode: Episode, answer: str | None) -> str:
    return VERDICT.format(question=episode.payload["question"], answer=(answer or "no answer").strip())


def _serve(payload: dict[str, Any], call: Any) -> str:
    """Run one tool call. An unknown tool is reported to the model and does not raise."""
    if call.type != "function" or call.function.name != "count":
        return "error: no such tool"
    return count(payload, call.function.arguments)


Message = dict[str, Any]
Payload = Mapping[str, Any]
_SHARE_RIGHT = 0.5  # of the episodes whose steps are labelled
# The mistakes of wrong episodes, with their relative frequencies.
MISTAKES = {"guess": 4, "no such box": 4, "another box": 1, "another item": 1, "another number": 1}


def demonstrations(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for sft: count the right item in the right box and answer with the number."""
    for prompt in prompts(split, count, seed):
        payload = prompt["payload"]
        messages = [_question(payload), *_call(payload, payload["box"], payload["item"]), _answer(_truth(payload))]
        yield {"id": prompt["id"], "payload": {"messages": messages, "tools": TOOLS}}


def comparisons(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for reward: a right episode beside one with a mistake."""
    generator = random.Random(f"comparisons/{split}/{seed}")
    for prompt in prompts(split, count, seed):
        payload = prompt["payload"]
        right = [*_call(payload, payload["box"], payload["item"]), _answer(_truth(payload))]
        wrong = _play(payload, generator, _mistake(generator))
        row = {
            "messages": [_question(payload)],
            "chosen": right,
            "rejected": [message for step in wrong for message in step],
            "tools": TOOLS,
        }
        yield {"id": prompt["id"], "payload": row}


def graded_steps(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for process_reward: a call is labelled 1 if its box and item are right, an answer if its number is."""
    generator = random.Random(f"graded_steps/{split}/{seed}")
    for prompt in prompts(split, count, seed):
        payload = prompt["payload"]
        mistake = "" if generator.random() < _SHARE_RIGHT else _mistake(generator)
        *calls, answer = _play(payload, generator, mistake)
        steps = [{"messages": call, "label": float(mistake in ("", "another number"))} for call in calls]
        steps.append({"messages": answer, "label": reward(payload, answer[0]["content"])})
        row = {"messages": [_question(payload)], "steps": steps, "tools": TOOLS}
        yield {"id": prompt["id"], "payload": row}


def _mistake(generator: random.Random) -> str:
    return generator.choices(list(MISTAKES), list(MISTAKES.values()))[0]


def _play(payload: Payload, generator: random.Random, mistake: str) -> list[list[Message]]:
    """Return the steps of an episode: the call with its result, except for a guess, and the answer."""
    box, item = payload["box"], payload["item"]
    if mistake == "another box":
        box = generator.choice([other for other in BOXES if other != box])
    elif mistake == "another item":
        item = generator.choice([other for other in ITEMS if other != item])
    elif mistake == "no such box":
        box = item
    said = count(payload, {"box": box, "item": item})
    if mistake in ("guess", "no such box", "another number"):
        said = str(generator.choice([other for other in COUNTS if str(other) != _truth(payload)]))
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
        {"role": "tool", "tool_call_id": "call_0", "content": count(payload, arguments)},
    ]


def _answer(said: str) -> Message:
    return {"role": "assistant", "content": said}
