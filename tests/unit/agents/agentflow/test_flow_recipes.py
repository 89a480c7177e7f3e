"""Recipes and demonstrations say the same things to a policy, and the demonstrations are of the loop."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from rillflow.agents.agentflow.models import parse
from rillflow.agents.agentflow.options import read_options
from rillflow.config import load_recipe
from rillflow.errors import ToolError
from rillflow.examples import tally
from rillflow.examples.stockroom import BOXES, ITEMS
from rillflow.examples.tally import PROMPTS, demonstrations

ACTIONS = ["think", "search", "code", "weigh", "guess", "answer"]


@pytest.mark.parametrize("name", ["agentflow", "agentflow_labels", "agentflow_pro"])
def test_the_recipe_asks_as_the_demonstrations_do(name: str) -> None:
    recipe = load_recipe(name)
    assert dict(read_options(recipe.options).prompts) == PROMPTS
    assert not read_options(recipe.options).fallback


@pytest.mark.parametrize("name", ["agentflow_gpu", "agentflow_pro_gpu", "agentflow_aime_gpu"])
def test_the_options_of_the_large_recipes_are_read(name: str) -> None:
    assert read_options(load_recipe(name).options).structured


@pytest.mark.parametrize("boxes", [1, 2])
def test_every_demonstration_can_be_read_by_the_loop(boxes: int) -> None:
    seen: Counter[str] = Counter()
    for row in demonstrations("train", 400, 1, mistakes=0.3, boxes=boxes):
        decision = parse(row["payload"]["messages"][-1]["content"], ACTIONS)
        assert decision is not None
        seen[decision.action] += 1
    assert seen.keys() == set(ACTIONS)


@pytest.mark.parametrize("boxes", [1, 2])
def test_without_mistakes_every_answer_is_paid(boxes: int) -> None:
    rows = [row["payload"]["messages"] for row in demonstrations("train", 100, 1, boxes=boxes)]
    payloads = {prompt["payload"]["question"]: prompt["payload"] for prompt in tally.prompts("train", 100, 1, boxes)}
    said = [(asked["content"].partition("\n")[0], parse(answer["content"], ACTIONS)) for asked, answer in rows]
    assert {decision.action for _, decision in said if decision} == {"search", "code", "answer"}
    for (asked, _), (question, decision) in zip(rows, said, strict=True):
        if decision and decision.action == "answer":
            assert decision.action_input.replace("=", ": ") in asked["content"], "it cites what the sum was"
            assert question in payloads


@pytest.mark.parametrize("boxes", [1, 2])
def test_splits_share_no_question_and_all_words(boxes: int) -> None:
    train, held = (set(tally.choices(split, boxes)) for split in ("train", "heldout"))
    assert not train & held
    for known in (train, held):
        assert {item for _, item in known} == set(ITEMS)
        assert {box for asked, _ in known for box in asked} == set(BOXES)
    assert len(held) * 3 == pytest.approx(len(train), rel=0.1)


async def test_tools_tell_what_is_wrong() -> None:
    payload = next(islice(tally.prompts("train", 1, 5), 1))["payload"]
    for query in ("", "red", "purple pens", "red elephants"):
        with pytest.raises(ToolError):
            tally.look_up(payload, query)
    for expression in ("", "2*3", "__import__('os')", "1+" * 40 + "1"):
        with pytest.raises(ToolError):
            await tally.code(expression)
    assert await tally.code(" 12 + 30 ") == "42"
