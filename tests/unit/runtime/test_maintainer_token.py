"""A maintainer that joins by URL needs the operator's token, and hands the node's to the nodes that it starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rillflow.config import load_recipe
from rillflow.errors import ConfigError
from rillflow.runtime.maintaining import place_at
from rillflow.types import RunRecipe
from rillflow.types.routes import Updates
from rillflow.weights.updates import Invitation
from rillflow.wire import Service
from rillflow.wire.tokens import Keyring, scoped_token

TOKEN = "t" * 32
NODE = scoped_token(TOKEN, "node")


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    recipe = load_recipe("quickstart", ["policies.agent.weights.source=http://relay:2"])

    async def told() -> RunRecipe:
        return Invitation(recipe, tmp_path / "elsewhere", Keyring.of_run(TOKEN)).answer()

    service = Service("dataflow", TOKEN)
    service.on(Updates.recipe, told)
    yield await service.start()
    await service.stop()


async def test_its_nodes_get_the_nodes_token(url: str, tmp_path: Path) -> None:
    place = await place_at(url, TOKEN, tmp_path / "state")
    assert (place.token, place.home.token) == (TOKEN, NODE)
    assert place.home.environment["RILLFLOW_TOKEN"] == NODE
    assert place.home.token_file.read_text() == f"{NODE}\n"
    assert place.home.token_file.stat().st_mode & 0o777 == 0o600


async def test_the_nodes_token_is_not_enough(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="operator's token"):
        await place_at(url, NODE, tmp_path / "state")
