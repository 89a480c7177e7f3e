"""The stockroom task with two policies: one solves it, the other judges the solution.

The solver is rewarded for a right answer, the checker for a verdict that fits, whether the answer was right or wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.agents.environments.stockroom import reward
from rillflow.agents.workflows.stockroom import play as solve

if TYPE_CHECKING:
    from rillflow.contracts import Episode

# The shipped policy has learned to answer questions that end like this one with yes or no.
VERDICT = "{question} {answer}. Is it right?"


async def play(episode: Episode) -> dict[str, float]:
    """One episode; returns the rewards of the run's two policies, the solver first."""
    solver, checker = episode.policies
    answer = await solve(episode)
    question = VERDICT.format(question=episode.payload["question"], answer=(answer or "no answer").strip())
    response = await episode.client.chat.completions.create(
        model=checker, messages=[{"role": "user", "content": question}], max_tokens=4
    )
    solved = reward(episode.payload, answer)
    return {solver: solved, checker: judged(response.choices[0].message.content, right=solved == 1.0)}


def judged(verdict: str | None, *, right: bool) -> float:
    """1.0 if the verdict is `yes` on a right answer or `no` on a wrong one, else 0.0."""
    return float((verdict or "").strip().lower() == ("yes" if right else "no"))
