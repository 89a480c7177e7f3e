"""A solver and a verifier: the verifier reads the solution and approves or rejects it; a rejected solver tries again.

Each answer of the solver is worth its own correctness, the verdict 1 where it fits the first answer's. What cannot be
read as a verdict is worth 0 and counts as approval. The trajectory is worth what the solver's last answer is.

With the option `balance` a training episode has two first answers. Verdicts are trained only where one of the two is
right and the other wrong, and then on both. So a verifier sees both classes equally often, however good its solver is:
it gains nothing by always approving. The verdict that decides about a second try is always the first answer's.
A solver that is always wrong, or always right, leaves no such verdicts, and the verifier's trainer would wait without
an end. So a node that has played `balance_within` training episodes in a row without one trains all verdicts until the
next. Each node counts for itself, from its start.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

from pydantic import Field

from rillflow.agents.options import filler, read_options
from rillflow.agents.workflows.multi_policy import Options, checker, is_right, outcome, problem_of, user
from rillflow.config.base import Positive
from rillflow.config.load import validated
from rillflow.errors import ConfigError
from rillflow.types import Said

if TYPE_CHECKING:
    from rillflow.config import Recipe
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
log = logging.getLogger(__name__)

UNBALANCED = "unbalanced"  # the verifier, where its verdict is not trained


class VerifierOptions(Options):
    balance: bool = Field(
        False, description="train verdicts on a right and a wrong answer to the same question, equally many of each"
    )
    balance_within: Positive = Field(
        1024, description="training episodes in a row without both on a node, after which all verdicts are trained"
    )


class OneSided:
    """Counts the training episodes in a row whose two first answers are both right or both wrong."""

    def __init__(self) -> None:
        self._episodes = 0

    def trains(self, differ: bool, within: int) -> bool:
        """Count an episode; return whether its verdicts are trained."""
        self._episodes = 0 if differ else self._episodes + 1
        if self._episodes == within:
            log.warning(
                "no question had a right and a wrong answer in %d episodes: all verdicts are trained until one has",
                within,
            )
        return differ or self._episodes >= within


_one_sided = OneSided()  # of this node


async def play(episode: Episode) -> dict[str, float]:
    """Roles: solver, verifier. The payload has `question` (or `problem`) and what `check` compares with."""
    options = read_options("options", episode.options, VerifierOptions)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options.check)
    solver, question = episode.role("solver"), problem_of(episode)
    settings = options.settings_of("solver")
    paired = options.balance and not episode.evaluating
    answers = await solver.ask_many(user(fill("solve", question=question)), 2 if paired else 1, **settings)
    worths = await asyncio.gather(*(check(answer.text) for answer in answers))
    differ = len({is_right(worth) for worth in worths}) == 2
    trained = not paired or _one_sided.trains(differ, options.balance_within)
    if paired:
        episode.metric("one_sided", trained and not differ)
    verifier = episode.role("verifier" if trained else UNBALANCED)
    verdicts: list[tuple[Said, float]] = []
    for answer, worth in zip(answers, worths, strict=True):
        episode.reward(worth, call=answer.call)
        if differ or not verdicts:
            prompt = user(fill("verify", question=question, solution=answer.text))
            verdict = await verifier.ask(prompt, **options.settings_of("verifier"))
            verdicts.append((verdict, _judged(verdict, worth)))
            episode.reward(verdicts[-1][1], call=verdict.call)
    (verdict, judged), worth = verdicts[0], worths[0]
    rejected = verdict_of(verdict.text) == "reject"
    episode.metric("first", worth)
    episode.metric("retried", rejected)
    if rejected:
        second = await solver.ask(user(fill("retry", question=question, verdict=verdict.text)), **settings)
        worth = await check(second.text)
        episode.reward(worth, call=second.call)
    return outcome(episode, worth, verifier=judged)


def check_recipe(recipe: Recipe) -> None:
    """Refuse, before a run starts, options that do not fit and balanced verdicts that would not be balanced."""
    if not validated(dict(recipe.options), VerifierOptions).balance:
        return
    if UNBALANCED not in recipe.untrained or recipe.roles.get(UNBALANCED) != recipe.roles.get("verifier", "verifier"):
        raise ConfigError(
            "options.balance: the verdicts that do not balance would be trained on, or said by another policy",
            f"set `roles: {{{UNBALANCED}: verifier}}` and `untrained: [{UNBALANCED}]`",
        )


def _judged(verdict: Said, worth: float) -> float:
    """Return 1.0 for a verdict that fits the answer's correctness, else 0.0."""
    said = verdict_of(verdict.text)
    return float(said is not None and (said == "approve") == is_right(worth))


def verdict_of(text: str) -> str | None:
    """Return the last `approve` or `reject` of a text, or None."""
    found = _VERDICT.findall(text)
    return found[-1].lower() if found else None
