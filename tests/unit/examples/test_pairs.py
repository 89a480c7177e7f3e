"""The pairs: a right answer is rewarded, the splits differ, and the demonstrations show all three roles."""

from __future__ import annotations

import re
from statistics import fmean

import pytest

from rillflow.examples import pairs

PAYLOAD = {"question": "3,6,1. Which two make 7?", "digits": [3, 6, 1], "target": 7}


@pytest.mark.parametrize(
    ("answer", "worth"),
    [("6+1", 1.0), ("1 + 6", 1.0), ("3+6, no: 6+1", 1.0), ("3+6", 0.0), ("4+3", 0.0), ("7", 0.0), (None, 0.0)],
)
def test_only_two_digits_of_the_question_are_right(answer: str | None, worth: float) -> None:
    assert pairs.reward(PAYLOAD, answer) == worth


def test_one_pair_of_three_is_right_and_no_question_is_in_both_splits() -> None:
    asked = {}
    for split in ("train", "heldout"):
        rows = [row["payload"] for row in pairs.prompts(split, 200, 1)]
        for row in rows:
            one, two, three = row["digits"]
            tries = [f"{one}+{two}", f"{one}+{three}", f"{two}+{three}"]
            assert sum(pairs.reward(row, answer) for answer in tries) == 1
            assert sum(sorted(row["digits"])[-2:]) <= 9
        asked[split] = {row["question"] for row in rows}
    assert not asked["train"] & asked["heldout"]
    assert len(asked["train"]) == 200  # a question comes again when all 405 have been asked
    assert len(asked["heldout"]) == len(pairs.questions("heldout")) == 135


def test_a_third_of_the_demonstrations_is_of_each_kind() -> None:
    rows = [row["payload"]["messages"] for row in pairs.lessons("train", 900, 1)]
    prompts = [row["payload"] for row in pairs.prompts("train", 900, 1)]
    solved = fmean(pairs.reward(prompts[n], rows[n][1]["content"]) for n in range(0, 900, 3))
    assert 0.4 < solved < 0.6
    for number in range(1, 900, 3):
        asked, answer = rows[number]
        assert "Is it right?" in asked["content"]
        form = r"\d\+\d=(\d), (\d)-(\d)=(-?\d): <verify>\w+</verify>"
        found, again, wanted, apart = (int(digit) for digit in re.fullmatch(form, answer["content"]).groups())
        assert found == again
        assert wanted == prompts[number]["target"]
        assert apart == found - wanted
        assert (apart == 0) == ("approve" in answer["content"])
    for asked, answer in rows[2::3]:
        assert "<verify>reject</verify>" in asked["content"]
        assert answer["content"] not in asked["content"].splitlines()[1]
