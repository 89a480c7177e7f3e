"""The Engine contract on a real SGLang, with tied and with untied embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
import pytest_asyncio
from contract import *  # noqa: F403
from contract_logprobs import *  # noqa: F403
from contract_world import World

from needs import SGLANG_PYTHON, require
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.servers import ServerEngine
from rillflow.engine.servers.inside.rillflow_sglang import ORDERS
from rillflow.engine.servers.sglang import SglangEngine
from rillflow.engine.servers.sglang_server import KEY
from rillflow.engine.servers.weights import model_facts
from rillflow.errors import EngineLost

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sglang_python() -> str:
    require("sglang")
    return str(SGLANG_PYTHON)


class SglangWorld(World):
    kind = "sglang"
    arguments: ClassVar = [
        "--preferred-sampling-params",
        '{"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_p": 0.3, "logit_bias": {"5": 20.0}}',
    ]

    def make(self, settings: EngineConfig) -> ServerEngine:
        return SglangEngine(model_facts(str(self.folder / "model"), "fp32"), settings, logs=self.folder)

    async def write(self, paths: list[str]) -> None:
        await self.engine._order("rillflow_patch", paths)

    def running(self, key: str = "") -> ServerConfig:
        shown = self.engine._session.headers["authorization"].removeprefix("Bearer ")
        return ServerConfig(url=self.engine._url, environment={ORDERS: str(self.engine._orders), KEY: key or shown})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["untied", "tied"])
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sglang_python: str
) -> AsyncIterator[SglangWorld]:
    world = SglangWorld(tmp_path_factory.mktemp(request.param), sglang_python, tied=request.param == "tied")
    await world.start()
    yield world
    await world.engine.close()


async def test_a_stranger_is_refused(world: SglangWorld) -> None:
    server = ServerConfig(**world.running("another").model_dump() | {"start_timeout": 2.0})
    stranger = world.make(world.settings.model_copy(update={"server": server}))
    with pytest.raises(EngineLost, match="does not serve"):
        await stranger.start()
