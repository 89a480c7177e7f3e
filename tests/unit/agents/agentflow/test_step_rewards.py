"""Rewards of single decisions: several from one state, played to the end or scored, with a share of the outcome."""

from __future__ import annotations

import re

import pytest
from flow_world import COUNTS, FIRST, PAID, PAYLOAD, SECOND, played, says

from rillflow.agents.agentflow.labels import states_of
from rillflow.agents.agentflow.loop import check_recipe
from rillflow.config import load_recipe
from rillflow.errors import ConfigError
from rillflow.examples import tally

CHECK = "rillflow.examples.tally:reward"
SUM = says("code", f"{COUNTS[0]}+{COUNTS[1]}")
RIGHT, WRONG = says("answer", PAID), says("answer", "1+1=2")


async def test_decisions_are_worth_the_mean_outcome_of_their_continuations() -> None:
    seen = await played(
        says("search", FIRST), RIGHT,       # two decisions from the first state: the first is carried out
        says("search", SECOND), WRONG,      # ... from the second
        SUM, SUM,                           # ... from the third: the same decision twice
        RIGHT, "no JSON",                   # ... from the fourth
        # Continuations of the decisions that do not end the episode: one each.
        WRONG, RIGHT, RIGHT,
        max_steps=4, verifier="none", check=CHECK, fallback=False,
        process_reward={"continuations": 1, "actions": 2, "least": 0.0},
    )  # fmt: skip
    assert seen.answer == PAID
    first, second, third, fourth = (seen.rewards()[at : at + 2] for at in range(0, 8, 2))
    assert first[1] == 1.0
    assert second[1] == 0.0
    assert third[0] == third[1]
    assert fourth == [1.0, 0.0], "what is malformed is worth nothing"
    assert sorted([first[0], second[0], third[0]]) == [0.0, 1.0, 1.0]
    assert seen.metrics["continuations"] == 3
    assert set(seen.rewards("continuation")) == {None}
    states = states_of(seen.record.transcript())
    assert [len(state.decisions) for state in states] == [2, 2, 2, 1]
    assert [state.taken.action for state in states] == ["search", "search", "code", "answer"]
    assert states[0].decisions[1][1] == 1.0


async def test_rewards_that_hardly_differ_are_made_equal() -> None:
    seen = await played(
        RIGHT, WRONG, max_steps=1, verifier="none", check=CHECK,
        process_reward={"continuations": 1, "actions": 2, "least": 0.6},
    )  # fmt: skip
    assert seen.rewards() == [0.5, 0.5]


async def test_answers_from_one_state_share_its_turn() -> None:
    seen = await played(
        says("search", FIRST), WRONG, RIGHT, RIGHT, WRONG, max_steps=2, verifier="none", check=CHECK,
        process_reward={"continuations": 1, "actions": 2},
    )  # fmt: skip
    planner = [sample for sample in seen.record.samples("planner") if sample.agent == "planner"]
    assert [sample.turn for sample in planner] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["untrained=[]"], "untrained"),
        (["dataflow.grouping=turn"], "grouping"),
        (["options.process_reward.action=3"], "actions"),
    ],
)
def test_a_recipe_that_would_train_on_the_wrong_things_is_refused(overrides: list[str], named: str) -> None:
    check_recipe(load_recipe("agentflow_labels"))
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_recipe(load_recipe("agentflow_labels", overrides))


def test_the_task_pays_only_for_evidence() -> None:
    one, other = COUNTS
    assert tally.reward(PAYLOAD, f"{other} + {one} = {one + other}") == 1.0
    for answer in (
        None,
        "",
        str(one + other),
        f"{one}+{other}",
        f"{one}+{other}={one}",
        f"{one + 1}+{other - 1}={one + other}",
    ):
        assert tally.reward(PAYLOAD, answer) == 0.0
