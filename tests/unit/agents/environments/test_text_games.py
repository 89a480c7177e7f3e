"""The games that run in a Java process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from needs import ALFWORLD_DATA
from rillflow.agents.environments import alfworld, scienceworld, textworld_express
from rillflow.agents.environments.registry import environment_factory
from rillflow.agents.processes import close_pools
from rillflow.errors import ConfigError

SMALL = "numLocations=3,numDistractorItems=0,includeDoors=0"


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    close_pools()


async def _follow(environment: Any, payload: dict[str, Any]) -> list[Any]:
    seen = [await environment.reset(payload, 0)]
    for action in await environment.plan():
        seen.append(await environment.step(action))
    return seen


@pytest.mark.needs("textworld-express")
class TestTextWorldExpress:
    async def test_gold_wins_every_game_and_comes_again(self) -> None:
        make = environment_factory("textworld_express", {"gold": True, "steps": 100, "workers": 1})
        games = [game for game in textworld_express.GAMES if game != "sorting"]
        rows = list(textworld_express.prompts("train", len(games), 1, game=games))
        assert [row["payload"]["game"] for row in rows] == games
        one, other = make(), make()
        for row in rows:
            # Side by side in one Java process, and still the same game; only the library's gold paths may differ.
            assert await one.reset(row["payload"], 0) == await other.reset(row["payload"], 0)
            plan = await one.plan()
            seen = [(await asyncio.gather(one.step(action), other.step(action))) for action in plan]
            assert all(mine == theirs for mine, theirs in seen)
            seen = [mine for mine, _ in seen]
            assert seen[-1].done
            assert seen[-1].info["won"], row
            assert sum(step.reward for step in seen) == pytest.approx(1.0)
        await one.close()
        await other.close()

    async def test_sorting_is_played_alone(self) -> None:
        with pytest.raises(ConfigError, match="games: 1"):
            environment_factory("textworld_express", {"game": "sorting"})()
        alone = environment_factory("textworld_express", {"game": "sorting", "games": 1, "workers": 1, "gold": True})()
        assert (await _follow(alone, {"world": 3}))[-1].info["won"]
        with_others = environment_factory("textworld_express", {"workers": 1})()
        with pytest.raises(ConfigError, match="disturb"):
            await with_others.reset({"game": "sorting", "world": 3}, 0)
        await alone.close()
        await with_others.close()

    async def test_nonsense_is_told_and_steps_are_bounded(self) -> None:
        options = {"game": "coin", "parameters": SMALL, "steps": 3, "workers": 1}
        environment = environment_factory("textworld_express", options)()
        await environment.reset({"world": 4}, 0)
        for action in ("dance", "", "look around"):
            seen = await environment.step(action)
            assert seen.info["invalid"] == (action != "look around")
        assert seen.done
        assert not seen.info["won"]
        await environment.close()

    async def test_random_player_mostly_does_not_win(self) -> None:
        environment = environment_factory("textworld_express", {"game": "cookingworld", "steps": 20, "workers": 1})()
        draw, won = random.Random(1), 0
        for row in textworld_express.prompts("heldout", 5, 2, game="cookingworld"):
            seen = await environment.reset(row["payload"], 0)
            while not seen.done:
                seen = await environment.step(draw.choice(seen.actions or ["look around"]))
            won += seen.info["won"]
        assert won <= 1
        await environment.close()

    async def test_refused_parameters_are_a_clear_error(self) -> None:
        environment = environment_factory("textworld_express", {"workers": 1})()
        with pytest.raises(ConfigError, match="parameters"):
            await environment.reset({"game": "coin", "parameters": "numMoons=3", "world": 1}, 0)
        await environment.close()

    def test_splits_and_unknown_games(self) -> None:
        train, heldout = (
            {(row["payload"]["fold"], row["payload"]["world"]) for row in textworld_express.prompts(split, 300, 1)}
            for split in ("train", "heldout")
        )
        assert not train & heldout
        with pytest.raises(ConfigError, match="coin"):
            environment_factory("textworld_express", {"game": "chess"})()


@pytest.mark.needs("scienceworld")
class TestScienceWorld:
    @pytest.mark.slow
    async def test_gold_wins_nonsense_is_told_and_splits_are_apart(self) -> None:
        rows = {split: list(scienceworld.prompts(split, 200, 1)) for split in ("train", "heldout")}
        train, heldout = ({row["payload"]["variation"] for row in rows[split]} for split in ("train", "heldout"))
        assert not train & heldout
        environment = environment_factory("scienceworld", {"gold": True, "workers": 1})()
        payload = rows["heldout"][0]["payload"]
        seen = await _follow(environment, payload)
        assert seen[-1].info["won"]
        assert sum(step.reward for step in seen) == pytest.approx(1.0)
        again = await environment.reset(payload, 0)
        assert sorted(again.text.split()) == sorted(seen[0].text.split())
        assert (await environment.step("dance wildly")).info["invalid"]
        with pytest.raises(ConfigError, match="no task"):
            await environment.reset({"task": "fly"}, 0)
        await environment.close()


class TestAlfWorld:
    def test_games_are_found_by_split(self, tmp_path: Any) -> None:
        for part, name in (("train", "a/t1"), ("train", "Sliced/t2"), ("valid_unseen", "b/t3")):
            folder = tmp_path / "json_2.1.1" / part / name
            folder.mkdir(parents=True)
            (folder / "game.tw-pddl").write_text("{}")
        games = {
            split: {row["payload"]["game"] for row in alfworld.prompts(split, 5, 1, folder=str(tmp_path))}
            for split in ("train", "heldout")
        }
        assert games == {"train": {"train/a/t1"}, "heldout": {"valid_unseen/b/t3"}}
        with pytest.raises(ConfigError, match="alfworld-download"):
            list(alfworld.prompts("train", 1, 1, folder=str(tmp_path / "nowhere")))

    @pytest.mark.needs("alfworld")
    async def test_alfworld_itself(self) -> None:
        environment = alfworld.AlfWorld(folder=ALFWORLD_DATA, gold=True, workers=1)
        (row,) = alfworld.prompts("heldout", 1, 1, folder=ALFWORLD_DATA)
        seen = await _follow(environment, row["payload"])
        assert seen[-1].info["won"]
        await environment.close()
