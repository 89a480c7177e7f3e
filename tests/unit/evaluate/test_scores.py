"""Scores of answers, compared with brute force where that is feasible, and the keys by which answers vote."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from rillflow.evaluate.records import Record
from rillflow.evaluate.scores import bootstrap, majority, pass_at, score, vote, wilson


def record(question: str, sample: int, reward: float | None, vote: str | None = None, **more: object) -> Record:
    return Record(question, sample, 0, reward=reward, vote=vote, cause="" if reward is not None else "timeout", **more)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    for right in range(samples + 1):
        answers = [place < right for place in range(samples)]
        for k in range(1, samples + 1):
            drawn = [any(chosen) for chosen in combinations(answers, k)]
            assert pass_at(right, samples, k) == pytest.approx(fmean(drawn))


def test_samples_without_a_reward_count_for_nothing_and_are_counted() -> None:
    found = score([record("a", 0, 1.0), record("a", 1, None), record("b", 0, 0.0), record("c", 0, None)], seed=0)
    assert found.average is not None
    assert found.average.value == 0.5, "of the questions a and b"
    assert (found.questions, found.samples, found.rewarded, found.no_reward) == (3, 4, 2, {"timeout": 2})
    nothing = score([record("c", 0, None)], seed=0)
    assert (nothing.average, nothing.passed, nothing.majority) == (None, {}, None)


def test_questions_count_the_same_however_many_samples_they_have() -> None:
    found = score([record("a", n, 1.0) for n in range(3)] + [record("b", 0, 0.0)], seed=0)
    assert found.average is not None
    assert found.average.value == 0.5
    assert list(found.passed) == [1], "of b there is one sample"


def test_pass_at_k_counts_full_rewards_alone() -> None:
    found = score([record("a", n, reward) for n, reward in enumerate([0.5, 1.0, 0.0, 0.5])], seed=0)
    assert {k: one.value for k, one in found.passed.items()} == {1: 0.25, 2: 0.5, 4: 1.0}


def test_the_majority_is_what_most_answers_say() -> None:
    assert majority([record("a", 0, 1.0, "7"), record("a", 1, 1.0, "7"), record("a", 2, 0.0, "8")]) == 1.0
    assert majority([record("a", 0, 1.0, "7"), record("a", 1, 0.0, "8")]) == 0.5, "two with as many votes"
    assert majority([record("a", 0, 0.0, None), record("a", 1, 1.0, "7")]) == 1.0, "who says nothing has no vote"
    assert majority([record("a", 0, 0.0, None)]) == 0.0


def test_lengths_and_cuts_are_of_all_samples_that_did_not_fail() -> None:
    played = [record("a", 0, 1.0, tokens=10), record("a", 1, 0.0, tokens=30, cut=True)]
    found = score([*played, record("a", 2, None), record("b", 0, None)], seed=0)
    assert (found.mean_tokens, found.cut) == (20, 0.5)


def test_the_bootstrap_is_the_same_for_a_seed_and_covers_the_mean() -> None:
    values = np.random.RandomState(0).rand(100)
    one = bootstrap(values, 3)
    assert one == bootstrap(values, 3)
    assert one != bootstrap(values, 4)
    error = 1.96 * values.std(ddof=1) / 10
    assert one.low == pytest.approx(values.mean() - error, abs=0.01)
    assert one.high == pytest.approx(values.mean() + error, abs=0.01)


def test_wilson_is_honest_where_all_are_wrong() -> None:
    none = wilson(0.0, 40)
    assert none.low == pytest.approx(0, abs=1e-9)
    assert none.high == pytest.approx(0.0876, abs=1e-3)
    half = wilson(0.5, 100)
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-3), pytest.approx(0.5962, abs=1e-3))


def test_the_interval_is_over_questions_not_over_samples() -> None:
    """Four equal samples of a question tell no more than one."""
    one = score([record(str(n), 0, float(n % 2)) for n in range(20)], seed=0)
    four = score([record(str(n), s, float(n % 2)) for n in range(20) for s in range(4)], seed=0)
    assert one.average == four.average


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
