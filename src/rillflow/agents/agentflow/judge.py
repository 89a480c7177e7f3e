"""How good each step was, by a judge: any model behind an OpenAI-compatible server, asked once for each step.

It reads what the process reward model will read (`prm_text`), so it cannot rate what that model never sees. A step
whose verdict cannot be had ends its row there: it is left out with those behind it, and counted, never guessed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai

from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.options import Endpoint
from rillflow.agents.agentflow.prm_text import prm_row
from rillflow.agents.agentflow.verifier import new_client

AT_ONCE = 8
_TRIES = 3
RUBRIC = (
    "Rate the last decision of an agent that answers a question step by step. You do not see what its tools said.\n"
    "1.0: the best next step. 0.7: useful, not the best. 0.4: does no harm and brings little. 0.1: useless, repeated "
    'or a guess. 0.0: wrong.\nWrite exactly one JSON object: {"score": number}.\n\n'
)


async def label_by_judge(episodes: Sequence[Played], endpoint: Endpoint) -> tuple[list[dict[str, Any]], int]:
    """The rows, and how many steps have no label."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def row(episode: Played, client: openai.AsyncOpenAI) -> tuple[dict[str, Any] | None, int]:
        texts = [step["text"] for step in prm_row(episode.question, episode.decisions)["steps"]]

        async def score(count: int) -> float | None:
            async with gate:
                return await _score(client, endpoint, episode.question, texts[:count])

        scores = await asyncio.gather(*(score(count + 1) for count in range(len(texts))))
        known = next((place for place, score in enumerate(scores) if score is None), len(scores))
        made = prm_row(episode.question, episode.decisions[:known], scores[:known]) if known else None
        return made, len(scores) - known

    # Its own, closed at its end: the next call may come from another event loop, which cannot use these connections.
    async with new_client(endpoint) as client:
        rows = await asyncio.gather(*(row(episode, client) for episode in episodes))
    return [made for made, _ in rows if made is not None], sum(missing for _, missing in rows)


async def _score(client: openai.AsyncOpenAI, endpoint: Endpoint, question: str, steps: Sequence[str]) -> float | None:
    prompt = f"{RUBRIC}Question: {question}\nDecisions:\n" + "\n".join(f"- {step}" for step in steps)
    for _ in range(_TRIES):
        try:
            response = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                timeout=endpoint.seconds,
            )
        except openai.OpenAIError:
            continue
        score = read_score(response.choices[0].message.content or "")
        if score is not None:
            return score
    return None


def read_score(text: str) -> float | None:
    """The number between 0 and 1 that the judge's JSON names; None where there is none."""
    begin, end = text.find("{"), text.rfind("}")
    try:
        said = json.loads(text[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    score = said.get("score") if isinstance(said, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        return None
    return float(score)
