"""OpenEnv: our client and our server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rillflow.agents.environments import openenv
from rillflow.agents.environments.household import Household, prompts
from rillflow.agents.environments.openenv import OpenEnv, OpenEnvServer
from rillflow.errors import EnvironmentLost

(ROW,) = prompts("train", 1, 1, size="small")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = OpenEnvServer("household", Household, "secret")
    yield await server.start()
    await server.close()


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_an_episode_over_the_wire_is_the_episode_here(url: str, transport: Any) -> None:
    here, there = Household(), OpenEnv(url=url, transport=transport)
    assert await there.reset(ROW["payload"], 3) == await here.reset(ROW["payload"], 3)
    plan = await here.plan()
    for action in ["dance", *plan]:
        assert await there.step(action) == await here.step(action)
    assert (await there.state())["step_count"] == len(plan) + 1
    await there.close()


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_episodes_do_not_see_each_other(url: str, transport: Any) -> None:
    one, other = OpenEnv(url=url, transport=transport), OpenEnv(url=url, transport=transport)
    await one.reset(ROW["payload"], 0)
    await other.reset(ROW["payload"], 0)
    first = (await one.reset(ROW["payload"], 0)).actions
    assert first is not None
    await one.step(first[0])
    assert (await other.state())["step_count"] == 0
    await one.close()
    await other.close()


@pytest.mark.parametrize("path", ["reset", "step", "state", "schema", "metadata", "ws"])
async def test_every_route_wants_the_token(url: str, path: str) -> None:
    base = url.removesuffix("/secret")
    async with aiohttp.ClientSession() as client:
        method = client.post if path in ("reset", "step") else client.get
        for wrong in (f"{base}/{path}", f"{base}/guess/{path}"):
            async with method(wrong) as response:
                assert response.status == 401
        async with client.get(f"{base}/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_tokens_scheme_may_have_any_case(url: str, scheme: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"authorization": f"{scheme} secret"}) as client,
        client.get(url.replace("/secret", "/schema")) as response,
    ):
        assert response.status == 200


async def test_what_a_client_does_wrong_is_told(url: str) -> None:
    async with aiohttp.ClientSession(headers={"authorization": "Bearer secret"}) as client:
        base = url.removesuffix("/secret")
        for path, body in (("reset", b"{"), ("reset", b"[]"), ("step", b'{"action": {"action": 1}}'), ("step", b"{}")):
            async with client.post(f"{base}/{path}", data=body) as response:
                assert response.status == 422
        async with client.post(f"{base}/reset", data=io.BytesIO(b"x" * (openenv.LARGEST_REQUEST + 1))) as response:
            assert response.status == 413
        async with client.ws_connect(f"{base}/ws") as socket:
            for said in (
                "{",
                '{"type": "fly"}',
                '{"type": "step", "data": {}}',
                '{"type": "step", "data": {"action": "x"}}',
            ):
                await socket.send_str(said)
                assert (await socket.receive_json())["type"] == "error"
            await socket.send_json({"type": "reset", "data": {"seed": 1}})
            assert (await socket.receive_json())["type"] == "observation"


async def test_episodes_are_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "EPISODES", 1)
    one, other = OpenEnv(url=url), OpenEnv(url=url)
    await one.reset(ROW["payload"], 0)
    with pytest.raises(EnvironmentLost):
        await other.reset(ROW["payload"], 0)
    await one.close()


async def test_a_server_that_goes_away_is_lost_and_never_scored() -> None:
    server = OpenEnvServer("household", Household, "secret")
    client = OpenEnv(url=await server.start(), timeout=30)
    await client.reset(ROW["payload"], 0)
    await server.close()
    with pytest.raises(EnvironmentLost):
        await client.step("look")
    with pytest.raises(EnvironmentLost):
        await client.step("look")
    with pytest.raises(EnvironmentLost):
        await OpenEnv(url="http://127.0.0.1:1", timeout=30).reset({}, 0)
    await client.close()


@asynccontextmanager
async def answering(reset: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[OpenEnv]:
    """A client of a server that answers resets like this."""
    app = web.Application()
    app.router.add_post("/reset", reset)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    client = OpenEnv(url=f"http://{host}:{port}", transport="http")
    yield client
    await client.close()
    await runner.cleanup()


@pytest.mark.parametrize("reward", ['"much"', "NaN", "[1]"])
async def test_a_reward_that_is_none_is_no_reward(reward: str) -> None:
    async def reset(_: web.Request) -> web.Response:
        return web.Response(text=f'{{"observation": {{"text": "hi"}}, "reward": {reward}, "done": false}}')

    async with answering(reset) as client:
        with pytest.raises(EnvironmentLost, match="reward"):
            await client.reset({}, 0)


async def test_an_answer_may_come_in_pieces_but_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reset(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"observation": ', b'{"text": "hi"', b"}}"):
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response

    async with answering(reset) as client:
        assert (await client.reset({}, 0)).text == "hi"
        monkeypatch.setattr(openenv, "LARGEST", 20)
        with pytest.raises(EnvironmentLost, match="more than 20 bytes"):
            await client.reset({}, 0)


async def test_actions_that_must_be_objects(url: str) -> None:
    client = OpenEnv(url=url, action=None)
    await client.reset(ROW["payload"], 0)
    assert (await client.step("look")).info["invalid"]
    assert (await client.step('{"action": "look"}')).text.startswith("You stand")
    await client.close()
