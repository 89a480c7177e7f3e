"""A solver and a selector of programs: the solver writes two, the selector chooses one of them.

Each program gets the reward 1 if it passes all hidden tests. The selector gets 1 or 0 if exactly one program passes,
0.5 if both or neither do, and 0 if its text has no choice; then A is taken. The trajectory's reward is that of the
chosen program.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from rillflow.agents.options import filler, read_options
from rillflow.agents.workflows.coding import CodeOptions, example_of
from rillflow.agents.workflows.multi_policy import checker, is_right, outcome, problem_of, user

if TYPE_CHECKING:
    from rillflow.contracts import Episode

PROMPTS = {
    "solve": (
        "Write a Python program for the task below. Think first, then give the whole program in one ```python block."
        "\n\nTask:\n{question}{example}"
    ),
    "select": (
        "Two programs were written for the same task. Find the one that is right in all cases, edge cases included,"
        " and end with <final>A</final> or <final>B</final>.\n\n"
        "Task:\n{question}{example}\n\nProgram A:\n{a}\n\nProgram B:\n{b}"
    ),
}
_CHOICE = re.compile(r"<final>\s*([AB])\s*</final>", re.IGNORECASE)


async def play(episode: Episode) -> dict[str, float]:
    """Play one episode with the roles solver and selector. The payload is one of the reward `code`."""
    options = read_options("options", episode.options, CodeOptions)
    example = example_of(episode.payload)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options.check)
    solver, selector, question = episode.role("solver"), episode.role("selector"), problem_of(episode)
    solve = user(fill("solve", question=question, example=example))
    a, b = await solver.ask_many(solve, 2, **options.settings_of("solver"))
    select = user(fill("select", question=question, example=example, a=a.text, b=b.text))
    selected, worth_a, worth_b = await asyncio.gather(
        selector.ask(select, **options.settings_of("selector")),
        check(a.text),
        check(b.text),
    )
    choice = choice_of(selected.text)
    picked = worth_of_choice(choice, is_right(worth_a), is_right(worth_b))
    for said, worth in ((a, worth_a), (b, worth_b), (selected, picked)):
        episode.reward(worth, call=said.call)
    episode.metric("candidates", (worth_a + worth_b) / 2)
    return outcome(episode, worth_b if choice == "B" else worth_a, selector=picked)


def choice_of(text: str) -> str | None:
    """Return the last `A` or `B` of a text, or None."""
    found = _CHOICE.findall(text)
    return found[-1].upper() if found else None


def worth_of_choice(choice: str | None, a_passes: bool, b_passes: bool) -> float:
    """Return the selector's reward."""
    if choice is None:
        return 0.0
    if a_passes == b_passes:
        return 0.5
    return float((choice == "A") == a_passes)
