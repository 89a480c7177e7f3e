"""Lessons and the workflow that they are for; and the bench's own rule beside reasoning-gym's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.agents_gpu_reward import reward
from rillflow.agents.rewards.registry import make_reward
from rillflow.agents.workflows.question_lessons import demonstrations


def test_a_lesson_is_the_question_and_its_right_answer(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": ["6", "six"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    made = list(demonstrations(path=str(file)))
    assert [row["payload"]["messages"] for row in made] == [
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}],
    ]
    assert len({row["id"] for row in made}) == 2


@pytest.mark.parametrize(
    "answer", ["-4", "4 - 8 = -4.", "4", "-4.0", "It is -4, not 4", "-04", "nothing", "", None, "1,000"]
)
async def test_the_bench_scores_sums_as_reasoning_gym_does(answer: str | None) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    entry = {"question": "4 - 8 =", "answer": "-4", "metadata": {}, "source_dataset": "chain_sum"}
    theirs = make_reward("reasoning_gym", last_number=True, strict=True)
    assert reward(entry, answer) == await theirs(entry, answer)
