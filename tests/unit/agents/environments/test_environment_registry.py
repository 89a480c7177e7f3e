"""Environments by name, their options, and demonstrations."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import another_hash_seed
from rillflow.agents.environments import reasoning_gym
from rillflow.agents.environments.household import Household
from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory, target_of
from rillflow.agents.workflows.game import GameOptions, action_of, demonstrations
from rillflow.config import resolve_object
from rillflow.errors import ConfigError, DataError


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_name_leads_to_a_class_with_the_protocol(name: str) -> None:
    made = resolve_object(target_of(name))
    assert all(asyncio.iscoroutinefunction(getattr(made, method)) for method in ("reset", "step", "close"))


def test_a_factory_makes_one_for_each_episode() -> None:
    make = environment_factory("household", {"steps": 7})
    assert make() is not make()
    assert isinstance(make(), Household)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("houshold", {}, "did you mean 'household'"),
        ("household", {"step": 3}, "did you mean 'steps'"),
        ("household", {"steps": "many"}, "steps"),
        ("openenv", {}, "url"),
        ("tau", {"user": "ghost"}, "user"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_episode(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        environment_factory(name, options)
    assert said in str(error.value)


async def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, *, depth: int = 1): self.depth = depth\n"
        "    async def reset(self, payload, seed): return self.depth\n"
    )
    assert await environment_factory(f"{file}:Mine", {"depth": 3})().reset({}, 0) == 3  # type: ignore[comparison-overlap]
    with pytest.raises(ConfigError, match="depths"):
        environment_factory(f"{file}:Mine", {"depths": 3})


def test_demonstrations_win_and_are_what_the_workflow_records() -> None:
    rows = list(demonstrations("household", "train", 5, 1, prompts={"size": "small"}, game={"action": "json"}))
    assert len(rows) == 5
    for row in rows:
        roles = [message["role"] for message in row["payload"]["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert action_of(row["payload"]["messages"][1]["content"], GameOptions(action="json")).startswith("go to")
    assert rows == list(demonstrations("household", "train", 5, 1, prompts={"size": "small"}, game={"action": "json"}))
    with pytest.raises(ConfigError, match="no lessons"):
        list(demonstrations("openenv", "train", 1, 1))


@pytest.mark.slow
@pytest.mark.needs("reasoning-gym")
async def test_a_question_of_reasoning_gym() -> None:
    environment = environment_factory("reasoning_gym", {})()
    rows = list(reasoning_gym.prompts("train", 3, 1, dataset="leg_counting"))
    heldout = list(reasoning_gym.prompts("heldout", 3, 1, dataset="leg_counting"))
    assert not {row["payload"]["question"] for row in rows} & {row["payload"]["question"] for row in heldout}
    for row in rows:
        seen = await environment.reset(row["payload"], 0)
        assert seen.text == row["payload"]["question"]
        right = await environment.step(f"I think <answer>{(await environment.plan())[0]}</answer>")
        assert right.done
        assert right.reward == 1.0
        await environment.reset(row["payload"], 0)
        assert (await environment.step("many")).reward < 1.0
    drawn = environment_factory("reasoning_gym", {"dataset": "leg_counting"})
    assert await drawn().reset({}, 3) == await drawn().reset({}, 3)
    with pytest.raises(DataError, match="moon_counting"):
        await environment_factory("reasoning_gym", {"dataset": "moon_counting"})().reset({}, 3)
    with pytest.raises(ConfigError, match="the arguments have seed"):
        list(reasoning_gym.prompts("train", 3, 1, arguments={"seed": 4}))


DRAWN = """
import asyncio, json
from rillflow.agents.environments.reasoning_gym import ReasoningGym, prompts
drawn = [row["payload"] for row in prompts("train", 4, 1, dataset="isomorphic_strings")]
seen = asyncio.run(ReasoningGym(dataset="isomorphic_strings").reset({}, 3))
print(json.dumps([drawn, seen.text]))
"""


@pytest.mark.needs("reasoning-gym")
@pytest.mark.slow
async def test_questions_of_reasoning_gym_are_the_same_in_every_process() -> None:
    """This dataset draws from sets, whose order depends on the hash seed of a process."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DRAWN],
        env=os.environ | {"PYTHONHASHSEED": another_hash_seed()},
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    drawn = [row["payload"] for row in reasoning_gym.prompts("train", 4, 1, dataset="isomorphic_strings")]
    seen = await environment_factory("reasoning_gym", {"dataset": "isomorphic_strings"})().reset({}, 3)
    assert json.loads(done.stdout) == [drawn, seen.text]
