"""The promises of our own worlds: the same world again, a gold player that wins, reported invalid actions, an end."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory
from rillflow.config import resolve_object
from rillflow.errors import EnvironmentLost

OWN = ("household", "shop", "tau")


def prompts_of(name: str, split: str, count: int, seed: int, **own: Any) -> list[dict[str, Any]]:
    return list(resolve_object(ENVIRONMENTS[name].prompts or "")(split=split, count=count, seed=seed, **own))


async def follow(environment: Any, payload: dict[str, Any], actions: list[str] | None = None) -> list[Any]:
    """All observations of a play: of these actions, or of the environment's own plan."""
    seen = [await environment.reset(payload, 0)]
    for action in await environment.plan() if actions is None else actions:
        seen.append(await environment.step(action))
    return seen


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), world=st.integers(0, 1 << 30))
def test_same_payload_and_seed_give_the_same_world(name: str, seed: int, world: int) -> None:
    (row,) = prompts_of(name, "train", 1, seed)
    make = environment_factory(name, {})
    for payload in (row["payload"], {"world": world}, {}):
        one, other = asyncio.run(follow(make(), payload)), asyncio.run(follow(make(), payload))
        assert one == other


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_gold_player_earns_one(name: str, split: str) -> None:
    environment = environment_factory(name, {})()
    for row in prompts_of(name, split, 60, 5):
        seen = await follow(environment, row["payload"])
        assert seen[-1].done
        assert seen[-1].info["won"]
        assert sum(one.reward for one in seen) == pytest.approx(1.0)
        assert not any(one.info.get("invalid") for one in seen)


@pytest.mark.parametrize("name", OWN)
async def test_random_player_mostly_does_not_win(name: str) -> None:
    environment, draw, won = environment_factory(name, {})(), random.Random(3), 0
    for row in prompts_of(name, "train", 40, 6):
        seen = await environment.reset(row["payload"], 0)
        while not seen.done:
            seen = await environment.step(draw.choice(seen.actions) if seen.actions else "search[shirt]")
        won += seen.info["won"]
    assert won <= 6


@pytest.mark.parametrize("name", OWN)
async def test_nonsense_is_told_and_steps_are_bounded(name: str) -> None:
    environment = environment_factory(name, {"steps": 3})()
    with pytest.raises(EnvironmentLost):
        await environment.step("look")
    await environment.reset({"world": 1}, 0)
    for action in ('{"name": 1}', "{" * 5000, ""):
        seen = await environment.step(action)
        assert seen.text
        assert seen.info["invalid"]
        assert seen.reward == 0
    assert seen.done
    assert not seen.info["won"]
    again = await environment.step("look")
    assert again.done
    assert again.reward == 0


@pytest.mark.parametrize("name", ["household", "shop"])
async def test_gold_actions_are_among_the_possible_ones(name: str) -> None:
    environment = environment_factory(name, {})()
    for row in prompts_of(name, "train", 20, 8):
        seen = await environment.reset(row["payload"], 0)
        for action in await environment.plan():
            assert seen.actions is None or action in seen.actions
            seen = await environment.step(action)


@pytest.mark.parametrize("name", OWN)
def test_splits_share_nothing_and_prompts_come_again(name: str) -> None:
    keys = {"household": ("scene", "task", "thing", "place"), "shop": ("kind", "colour"), "tau": ("world",)}[name]
    train, heldout = (
        {tuple(row["payload"][key] for key in keys) for row in prompts_of(name, split, 400, 1)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert prompts_of(name, "train", 5, 1) == prompts_of(name, "train", 5, 1)
    assert prompts_of(name, "train", 5, 1) != prompts_of(name, "train", 5, 2)
    with pytest.raises(ValueError, match="unknown split"):
        prompts_of(name, "test", 1, 1)
