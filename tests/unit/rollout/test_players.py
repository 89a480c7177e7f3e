"""The player of a recipe is checked before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rillflow.config import Recipe
from rillflow.errors import ConfigError
from rillflow.gateway.feed import Feed
from rillflow.rollout.loading import check_players
from rillflow.rollout.players import CommandPlayer, OutsidePlayer, WorkflowPlayer, load_player

PLAY = "rillflow.examples.stockroom:play"


def recipe(**keys: Any) -> Recipe:
    prompts = {"generator": "rillflow.examples.stockroom:prompts"}
    return Recipe.model_validate(
        {"name": "r", "policies": {"a": {"model": "tiny"}}, "data": {"prompts": [prompts]}} | keys
    )


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"workflow": PLAY}, WorkflowPlayer),
        ({"command": "true", "rewards": "agent"}, CommandPlayer),
        ({"outside": True}, OutsidePlayer),
    ],
)
def test_each_recipe_has_its_player(tmp_path: Path, keys: dict[str, Any], kind: type) -> None:
    check_players(recipe(**keys))
    player = load_player(recipe(**keys), Feed(), tmp_path / "agents")
    assert isinstance(player, kind)
    assert player.wanted() == (0 if kind is OutsidePlayer else None)
    player.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workflow": "rillflow.examples.stockroom:reward"}, "is not an async function"),
        ({"workflow": "rillflow.examples.stockroom:plya"}, "did you mean 'play'"),
        ({"workflow": PLAY, "reward": "rillflow.examples.stockroom:BOXES"}, "is not a function"),
        ({"command": "no-such-agent", "rewards": "agent"}, "there is no program 'no-such-agent'"),
        ({"outside": True, "reward": "nowhere:reward"}, "cannot import nowhere"),
    ],
)
def test_what_cannot_play_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_players(recipe(**keys))
    assert message in str(refused.value)
