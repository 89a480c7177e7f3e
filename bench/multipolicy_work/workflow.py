"""The workflow of both sides of `bench.multipolicy`: the stockroom with a checker and a slow tool.

Every call of the tool waits for a time that depends on the task's seed and the turn alone, so both sides wait equally
long for the same episode. A wait costs no processor time.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any

from rillflow.examples import stockroom

if TYPE_CHECKING:
    from rillflow.contracts import Episode

# Log-normal, with the spread of the other benches with long tails: a mean of 1.6 s, one in a hundred above 10 s.
MEDIAN, SPREAD = 1.0, 1.0
LONGEST = 12.0


def latency(seed: int, turn: int = 0) -> float:
    """Return the seconds that a call of the tool takes."""
    draw = random.Random(f"{seed}/{turn}").gauss(0, 1)
    return min(LONGEST, MEDIAN * math.exp(SPREAD * draw))


async def play(episode: Episode) -> dict[str, float]:
    """Play `rillflow.examples.stockroom:play_checked` with a tool that takes `latency` seconds, outside evaluations."""
    solver, checker = episode.policies
    question = episode.payload["question"]
    answer = await _solve(episode, solver, question)
    asked = stockroom.VERDICT.format(question=question, answer=(answer or "no answer").strip())
    verdict = await episode.client.chat.completions.create(
        model=checker, messages=[{"role": "user", "content": asked}], max_tokens=4
    )
    solved = stockroom.reward(episode.payload, answer)
    return {solver: solved, checker: stockroom.judged(verdict.choices[0].message.content, right=solved == 1.0)}


async def _solve(episode: Episode, solver: str, question: str) -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(stockroom.MAX_TURNS):
        response = await episode.client.chat.completions.create(
            model=solver, messages=messages, tools=stockroom.TOOLS, max_tokens=32
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        if not episode.evaluating:
            await asyncio.sleep(latency(episode.seed, turn))
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            said = stockroom.count(episode.payload, call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return None
