"""The digits, the pairs and the formulas: prompts, rewards, and lessons that agree with the recipes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rillflow.agents.workflows.coding import CASES, choice_of, written_cases
from rillflow.agents.workflows.solver_verifier import verdict_of
from rillflow.config.load import load_recipe
from rillflow.examples import digits, formulas, pairs
from tiny_policy import tiny_tokenizer


@pytest.mark.parametrize("task", [digits, formulas, pairs])
def test_prompts_repeat_and_splits_are_apart(task: Any) -> None:
    rows = list(task.prompts("train", 200, 1))
    assert rows == list(task.prompts("train", 200, 1)) != list(task.prompts("train", 200, 2))
    held = {row["payload"]["question"] for row in task.prompts("heldout", 200, 1)}
    assert not held & {row["payload"]["question"] for row in rows}
    with pytest.raises(ValueError, match="unknown split"):
        list(task.prompts("test", 1, 1))


def test_digits_are_right_once() -> None:
    for row in digits.prompts("train", 50, 3):
        payload = row["payload"]
        right = [digit for digit in range(10) if digits.reward(payload, f"I think {digit}.")]
        assert right == [max(payload["digits"])]
        assert digits.reward(payload, None) == digits.reward(payload, "") == 0.0


def test_formulas_are_what_their_tests_say() -> None:
    for row in formulas.prompts("train", 50, 3):
        names: dict[str, Any] = {}
        exec("\n".join([row["payload"]["code"], *row["payload"]["test_list"]]), names)


def test_lessons_of_the_pairs() -> None:
    recipe = load_recipe("solver_verifier")
    prompts = recipe.options["prompts"]
    assert (prompts["verify"], prompts["retry"]) == (pairs.VERIFY, pairs.RETRY)
    rows = [row["payload"]["messages"] for row in pairs.lessons("train", 600, 1)]
    payloads = [row["payload"] for row in pairs.prompts("train", 600, 1)]
    solved = [pairs.reward(payload, answer["content"]) for payload, (_, answer) in zip(payloads, rows, strict=True)]
    assert sum(solved[::3]) == pytest.approx(100, abs=30)
    assert sum(solved[2::3]) == pytest.approx(100, abs=30)
    verdicts = [verdict_of(answer["content"]) for _, answer in rows[1::3]]
    shown = [
        pairs.reward(payload, asked["content"]) for payload, (asked, _) in zip(payloads[1::3], rows[1::3], strict=True)
    ]
    fits = [(verdict == "approve") == bool(right) for verdict, right in zip(verdicts, shown, strict=True)]
    assert sum(fits) == pytest.approx(190, abs=9), "an unchecked sum may lead to the same verdict"
    tokenizer: Any = tiny_tokenizer()
    longest = max(len(tokenizer.encode(answer["content"])) for _, answer in rows)
    assert longest < recipe.policies["verifier"].sampling.max_tokens


def test_lessons_of_shared_work() -> None:
    options = load_recipe("recursive").options["prompts"]
    assert options == {"tag": "{question}"}
    said = [row["payload"]["messages"] for row in digits.delegations("train", 40, 1)]
    assert all(re.fullmatch("<answer>[0-9]</answer>", messages[-1]["content"]) for messages in said)
    for messages in said[1::2]:
        asked, asks, results, answer = (message["content"] for message in messages)
        halves = re.findall("<ask>What is the largest of ([0-9]+)[?]</ask>", asks)
        assert digits.QUESTION.format(digits="".join(halves)) == asked
        assert results == "".join(f"<result>{max(half)}</result>" for half in halves)
        assert answer == f"<answer>{max(max(half) for half in halves)}</answer>"


def test_lessons_of_the_formulas() -> None:
    selector, tester = (load_recipe(name).options["prompts"] for name in ("solver_selector", "solver_tester"))
    assert selector["select"] == formulas.SELECT
    assert (tester["test"], tester["retry"]) == (formulas.TEST, formulas.RETRY)
    said = [row["payload"]["messages"] for row in formulas.lessons("train", 400, 1)]
    assert {choice_of(answer["content"]) for _, answer in said[1::4]} == {"A", "B"}
    for _, answer in said[2::4]:
        cases: Any = written_cases(answer["content"], {})
        assert cases is not None
        assert len(cases.cases) == CASES
