"""A workflow and a reward of our own for the tests of evaluations, and rows in the shape of GSM8K's."""

from __future__ import annotations

import json
from pathlib import Path

from rillflow.contracts import Episode


def write_rows(folder: Path, count: int) -> None:
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(1, count + 1)]
    (folder / "math").mkdir(parents=True)
    (folder / "math" / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def _said(episode: Episode) -> str:
    said = await episode.role("solver").ask([{"role": "user", "content": "How many lamps?"}], max_tokens=4)
    return said.text


async def right_at_first(episode: Episode) -> str:
    """Right where the sample's seed is even; the model is asked all the same."""
    await _said(episode)
    right = int(episode.payload["answer"])
    return f"\\boxed{{{right if episode.seed % 2 else right + 1}}}"


async def rewards_itself(episode: Episode) -> dict[str, float]:
    """Two policies, each with its own reward."""
    await _said(episode)
    await episode.role("checker").ask([{"role": "user", "content": "Is it right?"}], max_tokens=4)
    return {"solver": 0.25, "checker": 1.0}


async def fails(episode: Episode) -> str:
    raise ValueError("no such luck")
