"""Workflows of one question: prompts and demonstrations, the rule of the bench, and the best of n."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.agents_gpu_reward import reward
from rillflow.agents.rewards.registry import make_reward
from rillflow.agents.workflows.question import demonstrations, play_best_of, prompts
from team_play import in_turn, play_team


def test_lessons_are_questions_with_right_answers_and_splits_share_none(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"{a} + 1?", "answer": [str(a + 1), "many"]} for a in (*range(40), *range(40))]
    file.write_text("\n".join(map(json.dumps, rows)))
    asked: dict[str, list[str]] = {}
    for split in ("train", "heldout"):
        made = list(demonstrations(split, path=str(file)))
        messages = [row["payload"]["messages"] for row in made]
        assert all(int(said["content"]) == int(question["content"].split()[0]) + 1 for question, said in messages)
        asked[split] = [question["content"] for question, _ in messages]
        assert asked[split] == [row["payload"]["question"] for row in prompts(split, path=str(file))]
    assert len(asked["heldout"]) > 4
    assert sorted(asked["train"] + asked["heldout"]) == sorted({row["question"] for row in rows})
    with pytest.raises(ValueError, match="unknown split"):
        list(prompts("test", path=str(file)))


@pytest.mark.needs("reasoning-gym")
@pytest.mark.parametrize(
    "answer", ["-4", "4 - 8 = -4.", "4", "-4.0", "It is -4, not 4", "-04", "nothing", "", None, "1,000"]
)
async def test_the_bench_scores_sums_as_reasoning_gym_does(answer: str | None) -> None:
    entry = {"question": "4 - 8 =", "answer": "-4", "metadata": {}, "source_dataset": "chain_sum"}
    theirs = make_reward("reasoning_gym", last_number=True, strict=True)
    assert reward(entry, answer) == await theirs(entry, answer)


PAYLOAD = {"question": "How many?", "answer": "7"}


@pytest.mark.parametrize(
    ("answers", "rewards", "trajectory"),
    [
        (["7", "3", " 7"], [1.0, 0.0, 1.0], 1.0),
        (["3", "7", "3"], [0.0, 1.0, 0.0], 0.0),
        (["7", "1", "2"], [1.0, 0.0, 0.0], 1.0),
    ],
)
async def test_the_answer_given_most_often_is_taken(
    answers: list[str], rewards: list[float], trajectory: float
) -> None:
    options = {"check": "rillflow.examples.digits:reward"}
    episode = await play_team(play_best_of, PAYLOAD, {"solver": in_turn(answers)}, options=options)
    assert episode.reward == trajectory
    assert episode.of("solver") == rewards
