"""Best of n: the solver answers several times, and the answer that it gives most often is taken.

Each answer is worth its own correctness; the trajectory is worth what the answer taken is. It is what more samples of
one policy bring without another policy that looks at them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from pydantic import Field

from rillflow.agents.options import filler, read_options
from rillflow.agents.workflows.multi_policy import Options, checker, outcome, problem_of, user
from rillflow.config.base import Positive

if TYPE_CHECKING:
    from rillflow.contracts import Episode

PROMPTS = {"solve": "Solve the problem step by step. Put the final answer into \\boxed{}.\n\nProblem:\n{question}"}


class BestOfOptions(Options):
    answers: Positive = Field(3, description="how often the solver answers")


async def play(episode: Episode) -> dict[str, float]:
    """Role: solver. The payload has `question` (or `problem`) and what `check` compares with."""
    options = read_options("options", episode.options, BestOfOptions)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options.check)
    prompt = user(fill("solve", question=problem_of(episode)))
    answers = await episode.role("solver").ask_many(prompt, options.answers, **options.settings_of("solver"))
    worths = await asyncio.gather(*(check(answer.text) for answer in answers))
    for answer, worth in zip(answers, worths, strict=True):
        episode.reward(worth, call=answer.call)
    texts = [" ".join(answer.text.split()) for answer in answers]
    ((most, _),) = Counter(texts).most_common(1)
    return outcome(episode, worths[texts.index(most)])
