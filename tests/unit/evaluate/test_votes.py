from __future__ import annotations

import pytest

from rillflow.evaluate.scores import vote


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ("So it is \\boxed{1,234.0}.", "1234"),
        ("first \\boxed{3}, then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{ \\left( 3, 4 \\right) }", "(3,4)"),
        ("16 - 7 = 9\n#### 9 eggs", "9"),
        ("He has 3 and she has 12.50 dollars.", "12.5"),
        ("\\boxed{never closed and 5", "5"),
        ("\\boxed{1e1000000}", "1e1000000"),
        ("\\boxed{1e999999}", "1e999999"),
        ("\\boxed{-2e-999999}", "-2e-999999"),
        ("\\boxed{1e99999999999999999999}", "1e99999999999999999999"),
        ("\\boxed{1.5e3}", "1500"),
        ("\\boxed{NaN}", "NaN"),
        ("no number", None),
        ("", None),
        (None, None),
    ],
)
def test_of_a_solution_the_result_votes(answer: str | None, key: str | None) -> None:
    assert vote("math", answer) == key


def test_of_a_text_what_is_in_the_tags_votes_without_articles_and_case() -> None:
    assert vote("text", "I think <answer>The Eiffel Tower!</answer>") == vote("text", "eiffel tower")


def test_programs_do_not_vote() -> None:
    assert vote("code", "def f(): pass") is None
