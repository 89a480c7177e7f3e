"""`math`: answers that mean the same, and graders that hang."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.agents.rewards.registry import make_reward
from rillflow.errors import RewardError

pytestmark = pytest.mark.needs("math-verify")


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("She has 6 * 7 = <<6*7=42>>42 eggs.\n#### 42", "6 times 7 is 42.", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("42", "\\boxed{42}", 1.0),
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\frac{1}{2}", "\\frac12", 1.0),
        ("(-\\infty, 2]", "x \\in $(-\\infty, 2]$", 1.0),
        ("\\text{Evelyn}", "Evelyn", 1.0),
        (42, "42.0", 1.0),
        ("42", "43", 0.0),
        ("42", "either \\boxed{41} or \\boxed{42}", 0.0),  # hedging does not pay
        ("42", "I do not know", 0.0),
        ("42", "", 0.0),
        ("42", None, 0.0),
        ("42", "\\boxed{", 0.0),
    ],
)
async def test_answers_that_mean_the_same(gold: Any, answer: str | None, score: float) -> None:
    assert await make_reward("math")({"answer": gold}, answer) == score


async def test_only_the_box_counts_where_the_recipe_says_so() -> None:
    reward = make_reward("math", boxed=True)
    assert await reward({"answer": "42"}, "It is 42") == 0.0
    assert await reward({"answer": "42"}, "It is $\\boxed{42}$") == 1.0


async def test_any_of_several_right_answers_counts() -> None:
    assert await make_reward("math")({"answers": ["1", "2"]}, "2") == 1.0


@pytest.mark.parametrize("answer", ["\\boxed{9^{9^{9^{9}}}}", "$100000!!!$"])
async def test_an_expression_that_nobody_can_compute_is_no_reward(answer: str) -> None:
    """And the grader that was killed for it is replaced."""
    with pytest.raises(RewardError, match="took longer than 1 s"):
        await make_reward("math", seconds=1)({"answer": "3"}, answer)
    assert await make_reward("math", seconds=30)({"answer": "3"}, "3") == 1.0


async def test_a_right_answer_that_is_no_mathematics_is_no_reward() -> None:
    with pytest.raises(RewardError, match="cannot be read as mathematics"):
        await make_reward("math")({"answer": "\\boxed{}"}, "4")
