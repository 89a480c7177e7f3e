"""An engine that decodes deltas gets their files; if it cannot, the node decodes them and says why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pull_world import Source, Trainer, Weights, same

from rillflow.contracts import UNKNOWN, Deltas, Turn
from rillflow.errors import EngineLost, RillflowError, WeightsError
from rillflow.weights.codec import Adapter, merged
from rillflow.weights.node_weights import NodeWeights, Step
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher


class Decoder:
    """An engine with weights and without tokens. `trouble` is raised by its next update with deltas."""

    def __init__(self, trainer: Trainer) -> None:
        self._store = trainer.store
        self._held = NodeWeights()
        self.version, self.proven, self.decoding_refused = 0, True, ""
        self.trouble: RillflowError | None = None
        self.took: list[str] = []
        self.held: Weights = {}

    def start(self) -> None:
        self._held.replace(self._store.pull(0), self._store.manifest(0))
        self.held = self._held.tensors

    async def apply_deltas(self, deltas: Deltas, version: int, probe: Any = None) -> None:
        self.took.append("deltas")
        assert deltas.base == self.version
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble
        versions = range(deltas.base + 1, version + 1)
        self._held.advance(
            [Step(self._store.manifest(v), paths) for v, paths in zip(versions, deltas.steps, strict=True)]
        )
        assert deltas.fingerprints.items() <= self._held.fingerprints.items()
        self.held, self.version = self._held.tensors, version

    async def patch(self, patch: Any, version: int, probe: Any = None) -> None:
        self.took.append("patch")
        for name, (index_K, value_K) in patch.changes.items():
            self.held[name].view(-1)[slice(None) if index_K is None else index_K] = value_K
        self.version = version

    async def load(self, tensors: Any, version: int, probe: Any = None) -> None:
        self.took.append("whole")
        self.held = {name: tensor.clone() for name, tensor in tensors.items()}
        self.held["head"], self.version = self.held["embed"], version

    def stats(self) -> Any:
        return SimpleNamespace(load_seconds=0.0)


class TurnTaker(Decoder):
    """Takes its turn after it has prepared an update."""

    turn: Turn = nullcontext

    async def apply_deltas(self, deltas: Deltas, version: int, probe: Any = None) -> None:
        self.took.append("prepared")
        async with self.turn():
            await super().apply_deltas(deltas, version)


class World:
    def __init__(self, folder: Path, **settings: int) -> None:
        self.trainer = Trainer(folder, **settings)
        self.trainer.publish()
        self.source = Source(folder)
        self.puller = Puller(self.source)
        self.engine = Decoder(self.trainer)
        self.engine.start()
        engine: Any = self.engine
        self.refresher = Refresher("p", engine, self.puller)

    async def follow(self, count: int = 1) -> list[str]:
        """Publish, refresh, and return how the engine came by the weights, which are the published ones."""
        self.trainer.publish(count)
        return await self.refresh()

    async def refresh(self) -> list[str]:
        assert await self.refresher.refresh()
        assert self.engine.version == self.trainer.store.head()
        assert same(dict(self.engine.held), self.trainer.published[self.engine.version])
        took, self.engine.took = self.engine.took, []
        return took


async def test_an_engine_decodes_what_the_node_only_fetches(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.follow() == ["deltas"]
    assert await world.follow(3) == ["deltas"]
    one, three = world.refresher.transfers.last
    assert (one.kind, one.base, one.versions, one.by_engine, one.verify) == ("delta", 0, 1, True, 0.0)
    assert (three.base, three.version, three.versions) == (1, 4, 3)
    assert three.bytes == sum(world.trainer.store.line().entries[version].delta_bytes for version in (2, 3, 4))
    assert sorted(world.source.took()) == [(version, "delta.rfd") for version in range(1, 5)]
    assert world.source.forgotten == [1], "files stay until the next pull"
    assert world.puller._held.version is None, "the node has decoded nothing"
    assert "decoded by the engine" in str(one)


@pytest.mark.parametrize("takes_turns", [False, True])
async def test_an_engine_that_takes_turns_has_one_only_while_it_changes_its_weights(
    tmp_path: Path, takes_turns: bool
) -> None:
    world = World(tmp_path)
    engine: Any = TurnTaker(world.trainer) if takes_turns else world.engine
    engine.start()

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        engine.took.append("turn")
        yield
        engine.took.append("done")

    world.engine, world.refresher = engine, Refresher("p", engine, world.puller, turn=turn)
    prepared = ["prepared"] if takes_turns else []
    assert await world.follow() == [*prepared, "deltas"], "there is no turn before it serves anything"
    assert await world.follow() == [*prepared, "turn", "deltas", "done"]


async def test_an_engine_that_refuses_gets_the_whole_version_and_then_patches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    assert await world.follow(2) == ["deltas"]
    world.engine.trouble = WeightsError("steps has a dtype that is not coded as a delta")
    with caplog.at_level(logging.INFO):
        assert await world.follow() == ["deltas", "whole"]
    assert "sending version 3 to the engine as a whole: steps has a dtype" in caplog.text
    assert "decoding deltas on the node's host: steps has a dtype" in caplog.text
    assert await world.follow() == ["patch"]
    assert not world.refresher.transfers.last[-1].by_engine


async def test_a_server_that_was_lost_decodes_again_later(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.engine.trouble = EngineLost("it was killed")
    assert await world.follow() == ["deltas", "whole"]
    world.engine.start()  # its own copy, as it was at the beginning
    world.engine.version = 0
    assert await world.follow() == ["deltas"]


async def test_an_engine_that_cannot_decode_says_why_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    world.engine.decoding_refused = "its ranks hold parts of 5 tensors"
    with caplog.at_level(logging.INFO):
        assert await world.follow() == ["whole"]
        assert await world.follow() == ["patch"]
    assert caplog.text.count("decoding deltas on the node's host: its ranks hold parts of 5 tensors") == 1


async def test_an_engine_without_a_version_gets_the_whole_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.engine.version = UNKNOWN
    assert await world.follow() == ["whole"]


async def test_adapters_are_merged_on_the_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    weights = {f"up.lora_{part}": torch.ones(shape) for part, shape in (("A", (2, 32)), ("B", (128, 2)))}
    world.trainer.store.publish_adapter(Adapter(weights, 2, 4.0), 1, 0, 0)
    assert await world.refresher.refresh()
    assert world.engine.took == ["whole"]
    assert not torch.equal(world.engine.held["up"], world.trainer.published[0]["up"])


class Adder(Decoder):
    """An engine that adds adapters to the base that it holds."""

    base, adapters_refused, adapters_only = 0, "", False

    async def apply_adapter(self, adapter: Adapter, base: int, version: int, probe: Any = None) -> None:
        self.took.append("adapter")
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble
        assert base == self.base
        self.held, self.version = merged(self._store.pull(base), adapter), version

    async def load(self, tensors: Any, version: int, probe: Any = None) -> None:
        await super().load(tensors, version, probe)
        self.base = version


class LoraWorld(World):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.adder = Adder(self.trainer)
        self.adder.start()
        engine: Any = self.adder
        self.refresher = Refresher("p", engine, self.puller)

    def publish(self) -> None:
        version = max(self.trainer.store.versions()) + 1
        low = {f"up.lora_{part}": torch.full(shape, 0.1 * version) for part, shape in (("A", (2, 32)), ("B", (128, 2)))}
        self.trainer.store.publish_adapter(Adapter(low, 2, 4.0), version, self.trainer.store.head(), 0)

    async def follow(self, count: int = 1) -> list[str]:
        self.publish()
        return await self.refresh()

    async def refresh(self) -> list[str]:
        assert await self.refresher.refresh()
        head = self.trainer.store.head()
        assert head is not None
        assert self.adder.version == head
        assert same(dict(self.adder.held), self.trainer.store.pull(head))
        took, self.adder.took = self.adder.took, []
        return took


async def test_an_engine_that_adds_adapters_gets_them_alone(tmp_path: Path) -> None:
    world = LoraWorld(tmp_path)
    assert [await world.follow() for _ in range(3)] == [["adapter"]] * 3
    assert {version for version, _ in world.source.took()} == {1, 2, 3}
    assert world.puller._held.version is None, "the node holds no copy of the base"


async def test_an_adapter_that_is_refused_is_merged_and_so_are_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = LoraWorld(tmp_path)
    world.adder.trouble = WeightsError("the server does not hold the adapter of up")
    assert await world.follow() == ["adapter", "whole"]
    assert "merging the adapter of version 1 on the node's host: the server does not hold" in caplog.text
    assert await world.follow() == ["whole"], "its base is gone"
    world.trainer.store.rewind(0)
    assert await world.refresh() == ["whole"]
    assert await world.follow() == ["adapter"]


async def test_a_server_that_is_lost_with_an_adapter_gets_one_again(tmp_path: Path) -> None:
    world = LoraWorld(tmp_path)
    world.publish()
    world.adder.trouble = EngineLost("it was killed")
    assert not await world.refresher.refresh()
    assert await world.refresh() == ["adapter", "adapter"]


async def test_an_engine_that_takes_adapters_only_gets_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = LoraWorld(tmp_path)
    world.adder.adapters_only = True
    world.publish()
    world.adder.trouble = WeightsError("the server does not hold the adapter of up")
    assert not await world.refresher.refresh()
    assert world.adder.took == ["adapter"]
    assert "version 1 not loaded, version 0 goes on: the server does not hold" in caplog.text
    assert await world.refresh() == ["adapter", "adapter"]


async def test_adapters_are_merged_where_the_engine_refuses_them(tmp_path: Path) -> None:
    world = LoraWorld(tmp_path)
    world.adder.adapters_refused = "its server was not started with adapters"
    assert await world.follow() == ["whole"]


async def test_a_whole_version_is_pulled_where_deltas_take_more_bytes(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=12)
    world.trainer.publish(11, share=0.3)
    assert await world.follow() == ["whole"]
