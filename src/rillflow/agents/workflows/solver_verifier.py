"""A solver and a verifier: the verifier reads the solution and approves or rejects it; a rejected solver tries again.

Each answer of the solver is worth its own correctness, the verdict 1 where it fits the first answer's. What cannot be
read as a verdict is worth 0 and counts as approval. The trajectory is worth what the solver's last answer is.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from rillflow.agents.workflows.wording import (
    Options,
    checker,
    filler,
    is_right,
    options_of,
    outcome,
    problem_of,
    user,
)

if TYPE_CHECKING:
    from rillflow.contracts import Episode

PROMPTS = {
    "solve": "Solve the problem step by step. Put the final answer into \\boxed{}.\n\nProblem:\n{question}",
    "retry": (
        "Solve the problem step by step. Put the final answer into \\boxed{}. A verifier has read an earlier attempt of"
        " yours and rejected it; take what is right in its remarks into account.\n\nProblem:\n{question}\n\n"
        "The verifier's remarks:\n{verdict}"
    ),
    "verify": (
        "Check the solution of the problem. Work out for yourself whether its final answer is right, then end with"
        " <verify>approve</verify> or <verify>reject</verify>.\n\nProblem:\n{question}\n\nSolution:\n{solution}"
    ),
}
_VERDICT = re.compile(r"<verify>\s*(approve|reject)\s*</verify>", re.IGNORECASE)


async def play(episode: Episode) -> dict[str, float]:
    """Roles: solver, verifier. The payload has `question` (or `problem`) and what `check` compares with."""
    options = options_of(episode, Options)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options)
    solver, verifier, question = episode.role("solver"), episode.role("verifier"), problem_of(episode)
    settings = options.settings_of("solver")
    first = await solver.ask(user(fill("solve", question=question)), **settings)
    verdict, worth = await asyncio.gather(
        verifier.ask(user(fill("verify", question=question, solution=first.text)), **options.settings_of("verifier")),
        check(first.text),
    )
    said = verdict_of(verdict.text)
    judged = float(said is not None and (said == "approve") == is_right(worth))
    episode.reward(worth, call=first.call)
    episode.reward(judged, call=verdict.call)
    episode.metric("first", worth)
    episode.metric("retried", said == "reject")
    if said == "reject":
        second = await solver.ask(user(fill("retry", question=question, verdict=verdict.text)), **settings)
        worth = await check(second.text)
        episode.reward(worth, call=second.call)
    return outcome(episode, worth, verifier=judged)


def verdict_of(text: str) -> str | None:
    """`approve` or `reject`, the last one said; None where there is none."""
    found = _VERDICT.findall(text)
    return found[-1].lower() if found else None
