"""Tools and environment of a recipe are opened together or not at all."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

import pytest

from rillflow.config import Recipe
from rillflow.errors import ConfigError
from rillflow.rollout import episode


async def test_an_environment_that_cannot_be_had_leaves_no_tools_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = AsyncMock()
    monkeypatch.setattr(episode, "open_toolbox", opened)
    recipe = Mock(spec=Recipe, tools=(), roles={}, options={}, environment=Mock(options={}))
    recipe.environment.name = "no such environment"
    with pytest.raises(ConfigError, match="no such environment"):
        await episode.open_surroundings(recipe)
    opened.assert_not_called()
