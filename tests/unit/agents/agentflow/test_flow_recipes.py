"""Recipes and demonstrations say the same things to a policy, and the demonstrations are of the loop."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from rillflow.agents.agentflow.actions import parse
from rillflow.agents.agentflow.options import read_options
from rillflow.agents.agentflow.verifier import says_sufficient
from rillflow.config import load_recipe
from rillflow.errors import ToolError
from rillflow.examples import tally
from rillflow.examples.stockroom import BOXES, ITEMS
from rillflow.examples.tally_lessons import PROMPTS, demonstrations

ACTIONS = ["think", "search", "code", "answer"]


def test_the_recipe_asks_as_the_demonstrations_do() -> None:
    for name in ("agentflow", "agentflow_pro"):
        recipe = load_recipe(name)
        assert dict(read_options(recipe.options).prompts) == PROMPTS
        assert recipe.untrained == ["verifier"]


@pytest.mark.parametrize("name", ["agentflow_gpu", "agentflow_pro_gpu"])
def test_the_options_of_the_large_recipes_are_read(name: str) -> None:
    assert read_options(load_recipe(name).options).structured


@pytest.mark.parametrize("boxes", [1, 2])
def test_every_demonstration_can_be_read_by_the_loop(boxes: int) -> None:
    seen: Counter[str] = Counter()
    for row in demonstrations("train", 400, 1, mistakes=0.3, boxes=boxes):
        asked, said = (message["content"] for message in row["payload"]["messages"])
        decision = parse(said, ACTIONS)
        if asked.endswith("enough?"):
            seen[f"sufficient {says_sufficient(said)}"] += 1
        else:
            assert decision is not None
            seen[decision.action] += 1
    expected = {"sufficient True", "sufficient False", "think", "search", "answer"} | (
        {"code"} if boxes == 2 else set()
    )
    assert seen.keys() == expected


@pytest.mark.parametrize("boxes", [1, 2])
def test_without_mistakes_every_episode_is_as_short_as_can_be(boxes: int) -> None:
    said = [row["payload"]["messages"][-1]["content"] for row in demonstrations("train", 200, 1, boxes=boxes)]
    actions = Counter(decision.action for text in said if (decision := parse(text, ACTIONS)))
    assert abs(actions["search"] - boxes * actions["answer"]) <= 2


@pytest.mark.parametrize("boxes", [1, 2])
def test_splits_share_no_question_and_all_words(boxes: int) -> None:
    train, held = (set(tally.choices(split, boxes)) for split in ("train", "heldout"))
    assert not train & held
    for known in (train, held):
        assert {item for _, item in known} == set(ITEMS)
        assert {box for asked, _ in known for box in asked} == set(BOXES)
    assert len(held) * 3 == pytest.approx(len(train), rel=0.1)


async def test_tools_tell_what_is_wrong_and_the_reward_reads_the_last_number() -> None:
    payload = next(islice(tally.prompts("train", 1, 5), 1))["payload"]
    for query in ("", "red", "purple pens", "red elephants"):
        with pytest.raises(ToolError):
            tally.look_up(payload, query)
    for expression in ("", "2*3", "__import__('os')", "1+" * 40 + "1"):
        with pytest.raises(ToolError):
            await tally.code(expression)
    assert await tally.code(" 12 + 30 ") == "42"
    truth = tally.truth(payload)
    assert tally.reward(payload, f"1 and {truth}") == 1.0
    assert [tally.reward(payload, answer) for answer in (None, "", f"{truth} or 1")] == [0.0, 0.0, 0.0]
