"""One-digit addition: its prompts and its reward."""

from __future__ import annotations

import pytest

from rillflow.examples.addition import pairs, prompts, reward


def test_the_splits_share_no_pair_and_are_all_pairs() -> None:
    train, heldout = pairs("train"), pairs("heldout")
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 100
    assert 20 <= len(heldout) <= 30


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of train, heldout"):
        pairs("test")


def test_prompts_are_fixed_by_their_arguments() -> None:
    assert list(prompts("train", 20, 1)) == list(prompts("train", 20, 1))
    assert list(prompts("train", 20, 1)) != list(prompts("train", 20, 2))
    first = next(prompts("train", 1, 1))["payload"]
    assert str(first["sum"]) not in first["question"].split("?")[0].replace(" + ", "").split()


@pytest.mark.parametrize(
    ("answer", "value"),
    [("12", 1.0), ("It is 5 + 7 = 12.", 1.0), ("012", 1.0), ("13", 0.0), ("12 or 13", 0.0), ("", 0.0), (None, 0.0)],
)
def test_the_last_number_counts(answer: str | None, value: float) -> None:
    assert reward({"sum": 12}, answer) == value


def test_zero_is_a_sum_too() -> None:
    assert reward({"sum": 0}, "0") == 1.0
    assert reward({"sum": 0}, "none") == 0.0
