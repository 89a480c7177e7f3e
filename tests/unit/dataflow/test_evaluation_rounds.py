"""Evaluation rounds over several sources: their means, their average, and the versions that are kept for the best."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
from dataflow_server import served

from dataflow_world import POLICY, prompts
from rillflow.dataflow.sources import Joined


def two_sources() -> Joined:
    return Joined([("long", prompts(3, "h")), ("short", prompts(1, "h"))])


def play(world, rewards):
    """Play the round that runs: each source's episodes get the source's reward, None: they fail."""
    while world.ledger.evaluations.running:
        for lease in world.lease(1):
            reward = rewards[lease.task.prompt.source] if lease.task.lane == "eval" else float(lease.task.place)
            if reward is None:
                world.fail(lease)
            else:
                world.done(lease, reward=reward)


def events(world):
    rows = world.ledger.db.all("SELECT line FROM events")
    return [line for row in rows if (line := json.loads(row["line"])).get("event") == "evaluation"]


def test_the_reward_of_a_round_is_the_mean_of_its_sources(make_world):
    world = make_world(heldout=two_sources())
    play(world, {"long": 0.0, "short": 1.0})
    (result,) = world.ledger.evaluations.results()
    assert (result.reward, result.by_source) == (0.5, {"long": 0.0, "short": 1.0})
    (event,) = events(world)
    assert (event["reward"], event["by_source"]) == (0.5, {"long": 0.0, "short": 1.0})
    assert event["versions"] == {POLICY: 0}


def test_a_source_without_a_result_leaves_the_round_without_one(make_world):
    world = make_world(heldout=two_sources(), attempts=1)
    play(world, {"long": 1.0, "short": None})
    (result,) = world.ledger.evaluations.results()
    assert math.isnan(result.reward)
    assert result.by_source["long"] == 1.0
    assert events(world)[0]["reward"] is None


def test_one_source_has_no_table_of_sources(make_world):
    world = make_world(heldout=prompts(2, "h"))
    play(world, {"": 0.25})
    (result,) = world.ledger.evaluations.results()
    assert (result.reward, result.by_source) == (0.25, {})


def test_a_round_tells_the_mean_of_what_its_episodes_have_measured(make_world):
    world = make_world(heldout=prompts(2, "h"))
    for number, lease in enumerate(lease for lease in world.lease() if lease.task.lane == "eval"):
        kept = {"turns": 1.0 + 2 * number, **({"won": 1.0} if number else {})}
        world.ledger.complete(msgspec.structs.replace(world.news(lease), metrics=kept))
    world.ledger.advance()
    (event,) = events(world)
    assert {key: value for key, value in event.items() if key.startswith("episode/")} == {
        "episode/turns": 2.0,
        "episode/won": 1.0,
    }


def test_the_best_version_and_those_under_evaluation_are_wanted(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1)
    evaluations = world.ledger.evaluations
    assert evaluations.wanted(POLICY) == [0], "it is being evaluated"
    play(world, {"": 0.9})
    for reward in (0.2, 0.9, 0.1):
        world.step()
        assert world.ledger.lineage.heads[POLICY] in evaluations.wanted(POLICY)
        play(world, {"": reward})
    assert evaluations.wanted(POLICY) == [2], "the latest of equals"


async def test_the_trainer_can_ask_what_is_wanted(tmp_path: Path) -> None:
    async with served(tmp_path, heldout=prompts(1, "h")) as run:
        assert await run.client.versions_wanted(POLICY) == [0]
        assert await run.client.versions_wanted("nobody") == []
