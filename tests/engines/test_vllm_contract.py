"""The Engine contract on a real vLLM, with tied and with untied embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from contract import *  # noqa: F403
from contract_logprobs import *  # noqa: F403
from contract_world import World, untied

from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.servers import ServerEngine
from rillflow.engine.servers.inside.rillflow_channel import TOKEN
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import model_facts
from rillflow.errors import EngineLost

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


class VllmWorld(World):
    kind = "vllm"
    arguments: ClassVar = ["--override-generation-config", '{"repetition_penalty": 1.5, "min_p": 0.3}']

    def make(self, settings: EngineConfig) -> ServerEngine:
        return VllmEngine(model_facts(str(self.folder / "model"), "fp32"), settings, logs=self.folder)

    async def write(self, paths: list[str]) -> None:
        await self.engine._call("rillflow_patch", paths, deadline=60.0)

    def running(self, token: str = "") -> ServerConfig:
        channel: Any = self.engine._channel
        return ServerConfig(url=channel._url, environment={TOKEN: token or channel._token})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["untied", "tied"])
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_python: str
) -> AsyncIterator[VllmWorld]:
    world = VllmWorld(tmp_path_factory.mktemp(request.param), vllm_python, tied=request.param == "tied")
    await world.start()
    yield world
    await world.engine.close()


@untied
async def test_the_channel_opens_to_nobody_else(world: VllmWorld) -> None:
    stranger = world.make(world.settings.model_copy(update={"server": world.running("x" * 43)}))
    with pytest.raises(EngineLost, match="channel"):
        await stranger.start()
