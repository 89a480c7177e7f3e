"""An engine follows its weight store while it samples: by patches, and whole where a patch does not do."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.contracts import Patch
from rillflow.errors import EngineLost, Unavailable, WeightsError
from rillflow.types import Probe
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher, StoreSupply
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource


class Learner:
    """The trainer's side: a copy of the engine's model that changes a little and is published."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.store = FolderStore(folder, deltas=True)
        self.store.publish(self.weights, 0, None)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @torch.no_grad()
    def step(self, count: int = 1) -> int:
        for _ in range(count):
            for parameter in self.model.parameters():
                places = torch.rand(parameter.shape) < 0.02
                parameter[places] *= 1.05
            version = self.store.highest() + 1
            self.store.publish(self.weights, version, self.store.head())
        return version


class World:
    def __init__(self, kit: Any, engine: Any, learner: Learner, folder: Path) -> None:
        self.kit, self.engine, self.learner = kit, engine, learner
        self.turns: list[str] = []
        self.puller = Puller(FolderSource(folder), initial=lambda: kit.build().state_dict())
        self.refresher = Refresher("p", engine, self.puller, turn=self._turn)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self.turns.append("begin")
        yield
        self.turns.append("end")

    @property
    def kinds(self) -> list[str]:
        return [transfer.kind for transfer in self.refresher.transfers.last]

    async def is_current(self) -> bool:
        answer = await self.kit.ask(self.engine, self.kit.prompt(9), max_tokens=5, seed=1)
        assert answer.versions == [self.learner.store.head()] * 5
        expected: list[float] = self.kit.plain(self.learner.model, answer)
        return bool(answer.raw_logprobs == pytest.approx(expected, abs=1e-5))


@asynccontextmanager
async def following(kit: Any, folder: Path) -> AsyncIterator[World]:
    torch.manual_seed(0)
    learner = Learner(kit.build(), folder)
    async with kit.running(kit.build()) as engine:
        yield World(kit, engine, learner, folder)


async def test_the_engine_is_patched_from_version_to_version(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        assert not await world.refresher.refresh()  # it has the root's weights already
        for count in (1, 3):
            world.learner.step(count)
            assert await world.refresher.refresh()
            assert await world.is_current()
        transfers = world.refresher.transfers
        assert [(one.base, one.version, one.versions) for one in transfers.last] == [(0, 1, 1), (1, 4, 3)]
        assert (transfers.loads, transfers.delta_loads) == (2, 2)
        entries = world.learner.store.line().entries
        assert transfers.bytes == sum(entries[version].delta_bytes for version in range(1, 5))
        assert 0 < transfers.pause <= transfers.apply
        assert world.turns == ["begin", "end"] * 2
        assert not await world.refresher.refresh()


async def test_before_it_serves_an_engine_needs_no_turn(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        world.learner.step()
        assert await world.refresher.refresh()
        assert world.turns == []
        world.learner.step()
        assert await world.refresher.refresh()
        assert world.turns == ["begin", "end"]


async def test_answers_under_way_go_on_across_patches(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        running = asyncio.create_task(world.refresher.run(0.001))
        answers = [asyncio.create_task(kit.ask(world.engine, kit.prompt(9), max_tokens=90, seed=n)) for n in range(4)]
        done = 0
        while not all(answer.done() for answer in answers):
            world.learner.step()
            done += 1
            await kit.until(lambda: world.engine.version >= done or all(a.done() for a in answers))  # noqa: B023
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for answer in await asyncio.gather(*answers):
            assert len(answer.tokens) == 90
            assert answer.versions == sorted(answer.versions)
            assert len(set(answer.versions)) > 1
        assert set(world.kinds) == {"delta"}


async def test_an_engine_that_refuses_a_patch_gets_all(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(kit, tmp_path) as world:

        async def refuse(patch: Patch, version: int, probe: Probe | None) -> None:
            raise WeightsError("not this way")

        monkeypatch.setattr(world.engine, "patch", refuse)
        world.learner.step(2)
        assert await world.refresher.refresh()
        assert await world.is_current()


async def test_an_engine_that_dies_in_a_patch_is_loaded_whole_when_it_is_back(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(kit, tmp_path) as world:
        world.learner.step()
        await world.refresher.refresh()

        async def lost(*_: Any) -> None:
            world.engine._core.version = 0  # it comes back with its model's own weights
            raise EngineLost("it has gone")

        with monkeypatch.context() as broken:
            broken.setattr(world.engine, "patch", lost)
            broken.setattr(world.engine, "load", lost)
            world.learner.step()
            assert not await world.refresher.refresh()
        assert world.engine.version == 0
        assert await world.refresher.refresh()
        assert world.kinds == ["delta", "held"]  # nothing was fetched twice
        assert await world.is_current()
        world.learner.step()
        assert await world.refresher.refresh()
        assert world.kinds[-1] == "delta"
        assert await world.is_current()


async def test_an_engine_that_lost_its_weights_gets_them_again(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        world.learner.step()
        await world.refresher.refresh()
        await world.engine.load(kit.build().state_dict(), 0)
        assert await world.refresher.refresh()
        assert await world.is_current()


async def test_the_line_goes_back(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        world.learner.step(3)
        await world.refresher.refresh()
        world.learner.model.load_state_dict(world.learner.store.pull(1))
        world.learner.store.rewind(1)
        world.learner.store.mend(world.learner.weights, 1)
        assert await world.refresher.refresh()
        assert await world.is_current()
        assert world.learner.step() == 4
        assert await world.refresher.refresh()
        assert await world.is_current()


async def test_a_broken_version_is_skipped(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with following(kit, tmp_path) as world:
        version = world.learner.step()
        path = world.learner.store.path(version) / "delta.rfd"
        path.write_bytes(path.read_bytes()[:-1])
        assert not await world.refresher.refresh()
        assert world.engine.version == 0
        assert "version 1 not loaded" in caplog.text
        assert world.refresher.transfers.loads == 0


async def test_a_source_that_is_away_does_not_end_the_following(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(kit, tmp_path) as world:
        head, calls = world.puller.head, 0

        async def away() -> int | None:
            nonlocal calls
            calls += 1
            if calls < 4:
                raise Unavailable("no way there")
            return await head()

        monkeypatch.setattr(world.puller, "head", away)
        monkeypatch.setattr(world.puller, "changed", lambda seconds: away())
        monkeypatch.setattr("rillflow.weights.refresh._AWAY", 0.001)
        world.learner.step()
        running = asyncio.create_task(world.refresher.run(0.001))
        await kit.until(lambda: world.engine.version == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_store_in_memory_is_simply_read(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        world.refresher = Refresher("p", world.engine, StoreSupply(world.learner.store))
        world.learner.step(2)
        assert await world.refresher.refresh()
        assert await world.is_current()
        assert not await world.refresher.refresh()


async def test_what_a_node_that_is_behind_says_is_said_once(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(kit, tmp_path) as world:

        async def away() -> int | None:
            raise Unavailable("no way there")

        with monkeypatch.context() as patched:
            patched.setattr(world.puller, "head", away)
            for _ in range(20):
                assert not await world.refresher.refresh()
        assert caplog.text.count("no way there") == 1
        assert "version 0 goes on" in caplog.text
        world.learner.step()
        assert await world.refresher.refresh()
        monkeypatch.setattr(world.puller, "head", away)
        assert not await world.refresher.refresh()
        assert caplog.text.count("no way there") == 2, "what went well in between makes it news"


async def test_a_folder_that_is_away_for_a_moment_ends_nothing(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(kit, tmp_path) as world:
        world.learner.step()
        with monkeypatch.context() as patched:
            stale = OSError(errno.ESTALE, "Stale file handle")
            patched.setattr(Path, "stat", lambda *_, **__: (_ for _ in ()).throw(stale))
            assert not await world.refresher.refresh()
        assert await world.refresher.refresh()
