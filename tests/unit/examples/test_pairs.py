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


def test_one_pair_of_three_is_right_and_no_set_is_in_both_splits() -> None:
    for prompt in pairs.prompts("train", 50, 1):
        one, two, three = prompt["payload"]["digits"]
        tries = [f"{one}+{two}", f"{one}+{three}", f"{two}+{three}"]
        assert sum(pairs.reward(prompt["payload"], answer) for answer in tries) == 1
    train, heldout = (set(pairs.sets(split, 3)) for split in ("train", "heldout"))
    assert not train & heldout
    assert all(sum(sorted(digits)[-2:]) <= 9 for digits in train | heldout)


def test_a_third_of_the_demonstrations_is_of_each_kind() -> None:
    rows = [row["payload"]["messages"] for row in pairs.lessons("train", 900, 1)]
    prompts = [row["payload"] for row in pairs.prompts("train", 900, 1)]
    solved = fmean(pairs.reward(prompts[n], rows[n][1]["content"]) for n in range(0, 900, 3))
    assert 0.4 < solved < 0.6
    for number in range(1, 900, 3):
        asked, answer = rows[number]
        assert "Is it right?" in asked["content"]
        found, wanted = re.fullmatch(r"\d\+\d=(\d), make (\d): <verify>\w+</verify>", answer["content"]).groups()
        assert int(wanted) == prompts[number]["target"]
        assert (found == wanted) == ("approve" in answer["content"])
    for asked, answer in rows[2::3]:
        assert "<verify>reject</verify>" in asked["content"]
        assert answer["content"] not in asked["content"].splitlines()[1]
