"""The stockroom task with two agents that share one policy: one solves it, the other judges the solution.

Each agent's answers are rewarded for themselves, and say whose they are: with `dataflow.grouping: agent` a verdict is
compared with verdicts, a solution with solutions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.agents.environments.stockroom import reward
from rillflow.agents.workflows.stockroom import play as solve
from rillflow.agents.workflows.stockroom_checked import VERDICT, judged

if TYPE_CHECKING:
    from rillflow.contracts import Episode


async def play(episode: Episode) -> float:
    """One episode; the answers' own rewards go to their leaves, the solver's is the episode's."""
    answer = await solve(episode)
    question = VERDICT.format(question=episode.payload["question"], answer=(answer or "no answer").strip())
    response = await episode.agent("checker").chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": question}], max_tokens=4
    )
    solved = reward(episode.payload, answer)
    episode.reward(solved, leaf=0)
    episode.reward(judged(response.choices[0].message.content, right=solved == 1.0), leaf=1)
    return solved
