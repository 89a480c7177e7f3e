"""Workflows of one question: asked once, with tools, with searches in plain text, or answered several times.

`play` asks once. `prompts` splits any source of questions into `train` and `heldout`, and `demonstrations` makes rows
for `rillflow fit`. Invariant: a question belongs to exactly one split, however often the source repeats it, and is
yielded once.

`play_with_tools` lets the model call tools until it answers. Options: `system` (a system message), `turns` (model calls
at most, default 4).

`play_search` is for models without tool calls:

    model        … <search>who directed The Half-Way Girl</search>
    user         <information>[1] The Half-Way Girl: …</information>
    model        … <answer>New York</answer>

Each answer of the model ends with its tag. Search results come as messages of the user, so they are never trained.
Options: `turns` (most model calls, default 4), `tool` (the recipe's tool that searches, default search), `instructions`
(the text before the question).

`play_best_of` takes the answer that the solver gives most often. Each answer gets its own correctness as its reward;
the trajectory gets that of the answer taken. It shows what more samples of one policy gain without a second policy.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field
from xxhash import xxh3_64_intdigest

from rillflow.agents.environments.splits import check_split
from rillflow.agents.options import fill_template, filler, read_options
from rillflow.agents.rewards.base import golds
from rillflow.agents.roles import answer_uses
from rillflow.agents.workflows.multi_policy import Options, checker, outcome, problem_of, user
from rillflow.config import SourceConfig
from rillflow.config.base import Positive
from rillflow.dataflow.sources import open_source

if TYPE_CHECKING:
    from rillflow.contracts import Episode

_HELD_OUT = 4  # every fourth question, by its hash


async def play(episode: Episode) -> str | None:
    """Ask the prompt's `question` with the policy's sampling settings and return the answer.

    The option `template` puts text around the question: "{question} Give only the number."
    """
    template = str(episode.options.get("template", "{question}"))
    question = fill_template(template, {"question": episode.payload["question"]})
    response = await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": question}]
    )
    return response.choices[0].message.content


def prompts(split: str, **source: Any) -> Iterator[dict[str, Any]]:
    """Yield the questions of `split`; `source` has the keys of a recipe's `data.prompts`."""
    check_split(split)
    opened = open_source(SourceConfig.model_validate(source), seed=0, shuffle=False)
    seen: set[int] = set()
    for index in range(opened.length):
        prompt = opened.at(index)
        digest = xxh3_64_intdigest(prompt.payload["question"].encode())
        if digest not in seen and (digest % _HELD_OUT == 0) == (split == "heldout"):
            yield {"id": prompt.id, "payload": prompt.payload}
        seen.add(digest)


def demonstrations(split: str, key: str | None = None, **source: Any) -> Iterator[dict[str, Any]]:
    """Yield rows for sft: each question of `split` with its right answer."""
    for prompt in prompts(split, **source):
        payload = prompt["payload"]
        messages = [
            {"role": "user", "content": payload["question"]},
            {"role": "assistant", "content": golds(payload, key)[0]},
        ]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


TURNS = 4


async def play_with_tools(episode: Episode) -> str | None:
    """Ask the prompt's `question`, serve the tool calls, and return the answer, or None if the turns end without one.

    Results of tools are part of the next call's prompt and are not trained.
    """
    agent = episode.role("agent")
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.payload["question"]}]
    if system := episode.options.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    for _ in range(episode.options.get("turns", TURNS)):
        said = await agent.ask(messages, tools=episode.tools.schemas)
        if not said.uses:
            return said.text
        messages += [said.message, *await answer_uses(episode, said)]
    return None


INSTRUCTIONS = (
    "Answer the question. You may look things up first: write <search>what you look for</search> and stop; what is "
    "found comes between <information> and </information>. Search as often as you need to. When you know the answer, "
    "write it, as short as you can, as <answer>the answer</answer>."
)
WRONG = "Write either <search>what you look for</search> or <answer>the answer</answer>."
LAST = "This was the last search: now write <answer>the answer</answer>."
_STOPS = ["</search>", "</answer>"]
# The closing tag is the stop string, which clients do not see.
_ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*?)(?:</\1>|\Z)", re.DOTALL)


class Action(NamedTuple):
    """An action of the model."""

    kind: Literal["search", "answer"]
    text: str


async def play_search(episode: Episode) -> str | None:
    """Return the text of the answer, or None; rewards such as `exact_match` and `f1` take it."""
    agent = episode.role("agent")
    turns = episode.options.get("turns", TURNS)
    instructions = episode.options.get("instructions", INSTRUCTIONS)
    question = f"{instructions}\n\nQuestion: {episode.payload['question']}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for turn in range(turns):
        said = await agent.ask(messages, stop=_STOPS)
        action = read_action(said.text)
        if action is not None and action.kind == "answer":
            return action.text
        reply = WRONG if action is None else await _searched(episode, action.text)
        if turn == turns - 2:
            reply = f"{reply}\n{LAST}"
        messages += [said.message, {"role": "user", "content": reply}]
    return None


def read_action(text: str) -> Action | None:
    """Return the first action of a text; whatever the model writes after it is ignored."""
    found = _ACTION.search(text)
    if found is None or not found[2].strip():
        return None
    kind: Literal["search", "answer"] = "search" if found[1] == "search" else "answer"
    return Action(kind, found[2].strip())


async def _searched(episode: Episode, query: str) -> str:
    found = await episode.tools.call(episode.options.get("tool", "search"), {"query": query}, episode)
    return f"<information>{found}</information>"


BEST_OF_PROMPTS = {
    "solve": "Solve the problem step by step. Put the final answer into \\boxed{}.\n\nProblem:\n{question}",
}


class BestOfOptions(Options):
    answers: Positive = Field(3, description="how often the solver answers")


async def play_best_of(episode: Episode) -> dict[str, float]:
    """Role: solver. The payload has `question` (or `problem`) and what `check` compares with."""
    options = read_options("options", episode.options, BestOfOptions)
    fill, check = filler(BEST_OF_PROMPTS, options.prompts), checker(episode, options.check)
    prompt = user(fill("solve", question=problem_of(episode)))
    answers = await episode.role("solver").ask_many(prompt, options.answers, **options.settings_of("solver"))
    worths = await asyncio.gather(*(check(answer.text) for answer in answers))
    for answer, worth in zip(answers, worths, strict=True):
        episode.reward(worth, call=answer.call)
    texts = [" ".join(answer.text.split()) for answer in answers]
    ((most, _),) = Counter(texts).most_common(1)
    return outcome(episode, worths[texts.index(most)])
