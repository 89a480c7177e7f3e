"""The household's rules."""

from __future__ import annotations

import pytest

from rillflow.agents.environments.household import SCENES, TASKS, Household, prompts


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", ["small", "full"])
async def test_every_kind_of_errand_can_be_run_in_every_scene_that_has_it(task: str, size: str) -> None:
    for scene, kind in SCENES.items():
        if task not in kind.tasks:
            continue
        for row in prompts("train", 5, 3, size=size, tasks=[task], scenes=[scene]):
            environment = Household(steps=60)
            await environment.reset(row["payload"], 0)
            for action in await environment.plan():
                seen = await environment.step(action)
            assert seen.info["won"]


async def test_plan_wins_from_wherever_one_is() -> None:
    for row in prompts("train", 30, 4, size="full"):
        environment = Household(steps=100)
        seen = await environment.reset(row["payload"], 0)
        for turn in range(12):
            if seen.done:
                break
            assert seen.actions is not None
            seen = await environment.step(seen.actions[(7 * turn) % len(seen.actions)])
        for action in [] if seen.done else await environment.plan():
            seen = await environment.step(action)
        assert seen.info["won"]


async def test_what_is_behind_a_door_is_not_seen_before_it_is_open() -> None:
    environment = Household()
    await environment.reset({"world": 3, "scene": "kitchen", "task": "place", "thing": "cup", "place": "table"}, 0)
    seen = await environment.step("go to fridge 1")
    assert seen.text == "fridge 1 is closed."
    assert not any(action.startswith("take") for action in seen.actions or ())
    assert (await environment.step("open fridge 1")).text.startswith("fridge 1 has")


@pytest.mark.parametrize(
    "action",
    ["take cup 1 from table 1", "put cup 1 in sink 1", "heat cup 1 with stove 1", "use lamp 1", "open moon 1", "go to"],
)
async def test_actions_that_make_no_sense_change_nothing(action: str) -> None:
    environment = Household()
    await environment.reset({"world": 3, "scene": "kitchen", "task": "heat", "thing": "cup", "place": "table"}, 0)
    before = repr(environment.room)
    seen = await environment.step(action)
    assert seen.info["invalid"]
    assert repr(environment.room) == before


async def test_wrong_state_is_not_enough() -> None:
    payload = {"world": 5, "scene": "kitchen", "task": "cool", "thing": "egg", "place": "shelf"}
    environment = Household()
    await environment.reset(payload, 0)
    plan = [action for action in await environment.plan() if not action.startswith("cool")]
    for action in plan:
        seen = await environment.step(action)
    assert not seen.done
