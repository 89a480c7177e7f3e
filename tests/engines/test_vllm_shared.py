"""Two policies in one real vLLM: one base, an adapter of each, and updates that do not disturb the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_world import CONTEXT, ask, check, prompt, tokens, versions
from test_vllm_adapters import ALPHA, RANK, AdapterWorld

from conftest import build_model
from counting_engine import until
from rillflow.config import LoraConfig, PolicyConfig, TrainerConfig
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.build import build_engines
from rillflow.engine.servers import ServerEngine
from rillflow.types import Chunk

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


class Member(AdapterWorld):
    """One of the policies. Its model is the base of all of them."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self._given = engine
        super().__init__(folder, "")

    def make(self, settings: EngineConfig) -> ServerEngine:
        given: ServerEngine = self._given
        return given


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def team(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[list[Member]]:
    folder = tmp_path_factory.mktemp("shared")
    build_model(folder / "base", tied=True, seed=1)
    server = ServerConfig(python=vllm_python, adapters="shared")
    engine = EngineConfig(kind="vllm", slots=16, context=CONTEXT, device="cpu", server=server)
    policies = {
        name: PolicyConfig(
            model=str(folder / "base"), engine=engine, trainer=TrainerConfig(lora=LoraConfig(rank=rank, alpha=ALPHA))
        )
        for name, rank in (("a", RANK), ("b", 2 * RANK))
    }
    engines = build_engines(policies, exact=False, logs=folder)
    team = [Member(folder / name, engine) for name, engine in engines.items()]
    for member in team:
        await member.engine.start()
        assert not await member.refresher.refresh()
        assert member.engine.proven
    yield team
    for member in team:
        await member.engine.close()


async def test_policies_share_a_process_and_update_apart(team: list[Member]) -> None:
    first, second = team
    assert first.engine.process is second.engine.process
    answers: list[tuple[Member, list[int], list[Chunk]]] = []
    enough = asyncio.Event()

    async def keep_asking(member: Member, place: int) -> None:
        while not enough.is_set():
            asked = prompt(20 + place, seed=place)
            answers.append((member, asked, await ask(member.engine, asked, max_tokens=60)))

    async def sampled(member: Member) -> None:
        before = member.engine.stats().generated_tokens
        await until(lambda: member.engine.stats().generated_tokens > before + 60, 60)

    tasks = [asyncio.create_task(keep_asking(member, place)) for member in team for place in range(4)]
    # While the second policy serves the base, the first serves an adapter, and the other way round.
    for member, seed in ((first, 1), (first, 2), (second, 3), (first, 4), (second, 5)):
        await asyncio.gather(*(sampled(one) for one in team))
        await member.deliver(seed)
    await asyncio.gather(*(sampled(one) for one in team))
    enough.set()
    await asyncio.gather(*tasks)
    for member, count in ((first, 3), (second, 2)):
        assert member.kinds == ["adapter"] * count
        mine = [(asked, chunks) for one, asked, chunks in answers if one is member]
        assert {version for _, chunks in mine for version in versions(chunks)} == set(range(count + 1))
        for asked, chunks in mine:
            assert len(tokens(chunks)) == 60
            seams = [chunk.version for chunk in chunks if chunk.seam]
            assert seams == sorted(set(versions(chunks)))[1:], "an answer is cut by its own policy's updates alone"
            check(member, asked, chunks)


async def test_the_base_serves_again_beside_another_policys_adapter(team: list[Member]) -> None:
    first, second = team
    await first.engine.load(first.models[0].state_dict(), 0)
    asked = prompt(30)
    mine, others = await asyncio.gather(ask(first.engine, asked), ask(second.engine, asked))
    assert (set(versions(mine)), set(versions(others))) == ({0}, {second.version})
    check(first, asked, mine)
    check(second, asked, others)


async def test_both_policies_come_back_when_the_server_was_killed(team: list[Member]) -> None:
    first, second = team
    os.kill(first.engine.process.pid, signal.SIGKILL)
    for member in team:
        await until(lambda member=member: member.engine._calls.held == {"weights"}, 300)
    assert first.engine.process is second.engine.process
    for member in team:
        assert await member.refresher.refresh()
        asked = prompt(30, seed=7)
        chunks = await ask(member.engine, asked)
        assert set(versions(chunks)) == {member.version}
        check(member, asked, chunks)
        assert member.kinds[-1] == "adapter"
