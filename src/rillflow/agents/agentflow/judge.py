"""How good each decision was, by a judge: any model behind an OpenAI-compatible server, asked once for each decision
that was carried out.

The judge sees more than the process reward model that learns from it: the result of the decision, as the prompt that
the planner was asked with next. A decision whose verdict cannot be had has no label, and is counted, never guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import openai

from rillflow.agents.agentflow.actions import Decision
from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.labels import Key, Labels
from rillflow.agents.agentflow.options import Endpoint
from rillflow.agents.agentflow.verifier import new_client
from rillflow.agents.rewards.judge import ask_score
from rillflow.errors import RewardError

AT_ONCE = 8
_TRIES = 3
RUBRIC = (
    "Rate one decision of an agent that answers a question step by step.\n"
    "1.0: correct and clear progress. 0.7: useful, not the best. 0.5: does no harm and brings little. "
    "0.2: useless, repeated or a guess. 0.0: wrong.\n"
    'Write exactly one JSON object: {"score": number}.\n'
)


async def by_judge(episodes: Sequence[Played], endpoint: Endpoint) -> tuple[Labels, int]:
    """Return the labels, and how many decisions have none."""
    asked: dict[Key, str] = {}
    for episode in episodes:
        after = [state.prompt for state in episode.states[1:]] + [None]
        for state, later in zip(episode.states, after, strict=True):
            asked[episode.prompt, state.prompt, state.taken] = judge_prompt(state.prompt, state.taken, later)
    gate = asyncio.Semaphore(AT_ONCE)

    async def score(prompt: str) -> float | None:
        async with gate:
            return await _score(client, endpoint, prompt)

    # Its own, closed at its end: the next call may come from another event loop, which cannot use these connections.
    async with new_client(endpoint) as client:
        scores = await asyncio.gather(*(score(prompt) for prompt in asked.values()))
    labels = {key: score for key, score in zip(asked, scores, strict=True) if score is not None}
    return labels, len(asked) - len(labels)


def judge_prompt(state: str, decision: Decision, later: str | None) -> str:
    """Return what the judge is asked; `later` is the prompt after the decision, None if it ended the episode."""
    shown = "The decision ended the task." if later is None else f"Afterwards the agent was asked:\n{later}"
    return f"{RUBRIC}\nThe agent was asked:\n{state}\n\nIt decided:\n{decision.written()}\n\n{shown}"


async def _score(client: openai.AsyncOpenAI, endpoint: Endpoint, prompt: str) -> float | None:
    """Return the judge's score, or None if the judge gives none."""
    try:
        return await ask_score(client, endpoint.model, prompt, best=1.0, attempts=_TRIES, timeout=endpoint.seconds)
    except RewardError:
        return None
