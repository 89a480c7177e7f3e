"""An engine that follows a store proves each version, says what is wrong with one, and recovers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_embedded_probe import is_silent, moved, probe_of

from rillflow.contracts import UNKNOWN
from rillflow.engine.host import EngineHost
from rillflow.weights.codec import LORA_A, LORA_B, Adapter
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher, troubles
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class World:
    """A trainer that publishes, with probes, and an engine in doubt that follows it."""

    def __init__(self, kit: Any, engine: Any, folder: Path) -> None:
        self.kit, self.engine = kit, engine
        self.model = kit.build()
        self.store = FolderStore(folder, deltas=True)
        self.clock = FakeClock()
        puller = Puller(FolderSource(folder), initial=lambda: kit.build().state_dict())
        self.refresher = Refresher("p", engine, puller, doubts=True, clock=self.clock)

    def publish(self, *, probe: bool = True) -> int:
        version, parent = self.store.highest() + 1, self.store.head()
        if version:
            self.model = moved(self.model, seed=version)
        self.store.publish(self.model.state_dict(), version, parent, probe_of(self.model) if probe else None)
        return version

    async def serves(self, version: int) -> None:
        answer = await self.kit.ask(self.engine, self.kit.prompt(9), max_tokens=5, seed=1)
        assert answer.versions == [version] * 5
        assert answer.raw_logprobs == pytest.approx(self.kit.plain(self.model, answer), abs=1e-5)


@asynccontextmanager
async def following(kit: Any, folder: Path, seed: int = 0) -> AsyncIterator[World]:
    async with kit.running(kit.build(seed=seed)) as engine:
        yield World(kit, engine, folder)


async def test_version_0_is_proven_before_it_is_served(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        assert not await world.refresher.refresh()  # nothing is published yet
        asked = await is_silent(kit, world.engine)
        world.publish()
        assert not await world.refresher.refresh(), "nothing was loaded: it has these weights"
        assert (await asked).versions == [0] * 5
        for version in (1, 2):
            world.publish()
            assert await world.refresher.refresh()
            await world.serves(version)


async def test_an_engine_of_another_model_gets_the_published_weights(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(kit, tmp_path, seed=7) as world:
        world.publish()
        with caplog.at_level(logging.WARNING):
            assert await world.refresher.refresh()
        assert "version 0 to the engine as a whole: version 0 is not served, wrong weights" in caplog.text
        await world.serves(0)


async def test_versions_without_probes_are_served(kit: Any, tmp_path: Path) -> None:
    """Those of a run that an earlier release began."""
    async with following(kit, tmp_path) as world:
        world.publish(probe=False)
        assert not await world.refresher.refresh()
        await world.serves(0)
        world.publish(probe=False)
        assert await world.refresher.refresh()
        await world.serves(1)


async def test_an_engine_that_keeps_its_old_weights_is_found_out(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes patches and whole versions, and goes on computing with what it had."""
    async with following(kit, tmp_path) as world:
        world.publish()
        await world.refresher.refresh()
        world.publish()
        with monkeypatch.context() as spoilt, caplog.at_level(logging.WARNING):
            spoilt.setattr(world.engine._core._weights, "copy", lambda tensors: None)
            spoilt.setattr(world.engine._core._weights, "write", lambda writes: None)
            assert not await world.refresher.refresh()
        assert "version 1 not loaded, the engine samples nothing: version 1 is not served, stale weights" in caplog.text
        assert "still computes with version 0" in world.refresher.trouble
        assert world.engine.version == UNKNOWN
        host = EngineHost("e", {"p": world.engine})
        host.trouble = lambda: troubles([world.refresher])
        assert host.known.paused == "weights not proven yet", "no call is sent here"
        assert host.known.trouble == world.refresher.trouble
        asked = await is_silent(kit, world.engine)
        assert not await world.refresher.refresh(), "it is not tried again at once"
        world.clock.time += 11.0
        assert await world.refresher.refresh()
        assert (await asked).versions == [1] * 5
        assert world.refresher.trouble == ""
        assert host.known.paused == ""


async def test_a_newer_version_is_tried_at_once(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(kit, tmp_path) as world:
        world.publish()
        await world.refresher.refresh()
        world.publish()
        with monkeypatch.context() as spoilt:
            spoilt.setattr(world.engine._core._weights, "copy", lambda tensors: None)
            spoilt.setattr(world.engine._core._weights, "write", lambda writes: None)
            assert not await world.refresher.refresh()
        world.publish()
        assert await world.refresher.refresh()
        await world.serves(2)


async def test_a_patch_that_does_not_prove_right_is_followed_by_the_whole(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(kit, tmp_path) as world:
        world.publish()
        await world.refresher.refresh()
        world.publish()
        with caplog.at_level(logging.WARNING):
            monkeypatch.setattr(world.engine._core._weights, "write", lambda writes: None)
            assert await world.refresher.refresh()
        assert "to the engine as a whole" in caplog.text
        await world.serves(1)


async def test_an_adapter_that_does_not_arrive_is_stale_weights(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps the base: it reproduces the probe of version 0."""
    async with following(kit, tmp_path) as world:
        world.publish()
        await world.refresher.refresh()
        name = "model.layers.0.mlp.up_proj.weight"
        weight = world.model.state_dict()[name]
        low, high = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        with torch.no_grad():
            weight += 0.5 * high @ low
        world.store.publish_adapter(
            Adapter({name + LORA_A: low, name + LORA_B: high}, 2, 1.0), 1, 0, base=0, probe=probe_of(world.model)
        )
        with monkeypatch.context() as spoilt:
            spoilt.setattr("rillflow.weights.pull.merged", lambda base, adapter: base)
            assert not await world.refresher.refresh()
        assert "stale weights: the engine still computes with version 0" in world.refresher.trouble
        world.clock.time += 11.0
        assert await world.refresher.refresh()
        await world.serves(1)


async def test_a_cancelled_proof_leaves_the_engine_in_doubt(kit: Any, tmp_path: Path) -> None:
    async with following(kit, tmp_path) as world:
        world.publish()
        task = asyncio.create_task(world.refresher.refresh())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await is_silent(kit, world.engine)
        await world.refresher.refresh()
        await world.serves(0)
