"""Pulls: the cheapest chain from the held version to the head, planned again whenever the store changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from pull_world import Source, Trainer, same

from rillflow.errors import CorruptData, Unavailable, WeightsError
from rillflow.storage import file_hash
from rillflow.weights import pull, sealed
from rillflow.weights.codec import Adapter
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore


class HandClock:
    time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class World:
    def __init__(self, folder: Path, **settings: int) -> None:
        self.trainer = Trainer(folder, **settings)
        self.source = Source(folder)
        self.clock = HandClock()
        self.puller = Puller(self.source, clock=self.clock)

    @property
    def store(self) -> FolderStore:
        return self.trainer.store

    async def check(self) -> pull.Pulled:
        """Pull and check that the result is the head, bit for bit."""
        pulled = await self.puller.pull()
        assert pulled.version == self.store.head()
        assert same(dict(pulled.tensors), self.trainer.published[pulled.version])
        return pulled

    def damage(self, version: int, name: str) -> None:
        path = self.store.path(version) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)


async def test_first_whole_then_by_deltas(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(3)
    first = await world.check()
    assert (first.transfer.kind, first.transfer.versions, first.patch) == ("full", 2, None)
    assert sorted(world.source.took()) == [(0, "model.safetensors"), (1, "delta.rfd"), (2, "delta.rfd")]
    world.trainer.publish(1)
    second = await world.check()
    assert second.patch is not None
    assert (second.patch.base, second.transfer.kind, second.transfer.base) == (2, "delta", 2)
    assert second.transfer.bytes == world.store.line().entries[3].delta_bytes
    assert world.source.took() == [(3, "delta.rfd")]
    world.trainer.publish(5)
    third = await world.check()
    assert third.patch is not None
    assert (third.patch.base, third.transfer.versions) == (3, 5)
    assert sorted(world.source.took()) == [(version, "delta.rfd") for version in range(4, 9)]
    assert set(world.source.forgotten) == set(range(9))


async def test_what_is_held_is_not_fetched_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.source.took()
    again = await world.check()
    assert (again.patch, again.transfer.kind, again.transfer.bytes) == (None, "held", 0)
    assert world.source.took() == []


async def test_a_whole_version_where_that_is_cheaper(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=12)
    world.trainer.publish(1)
    await world.check()
    world.source.took()
    world.trainer.publish(12, share=0.3)  # whose deltas together are longer than the version
    pulled = await world.check()
    assert pulled.transfer.kind == "full"
    assert world.source.took() == [(12, "model.safetensors")]


@pytest.mark.parametrize(("mode", "kind"), [("full", "full"), ("delta", "delta")])
async def test_the_mode_is_obeyed(tmp_path: Path, mode: str, kind: str) -> None:
    trainer = Trainer(tmp_path, snapshot_every=1)
    puller = Puller(Source(tmp_path), mode)  # type: ignore[arg-type]
    trainer.publish(1)
    await puller.pull()
    trainer.publish(2, share=0.3)
    pulled = await puller.pull()
    assert pulled.transfer.kind == kind
    assert same(dict(pulled.tensors), trainer.published[2])


async def test_a_damaged_delta_is_gone_around(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=3)
    world.trainer.publish(1)
    await world.check()
    world.trainer.publish(3)
    world.damage(2, "delta.rfd")
    assert (await world.check()).transfer.kind == "full"
    world.trainer.publish(1)
    assert (await world.check()).transfer.kind == "delta"


async def test_a_delta_that_was_published_wrong_is_gone_around(tmp_path: Path) -> None:
    """Its file has its hash, and what it makes of the weights is not what the manifest says."""
    world = World(tmp_path, snapshot_every=3)
    world.trainer.publish(1)
    await world.check()
    world.trainer.publish(3)
    world.damage(2, "delta.rfd")
    path, manifest = world.store.path(2), world.store.manifest(2)
    hashed = msgspec.structs.replace(manifest.files["delta.rfd"], sha256=file_hash(path / "delta.rfd"))
    text = sealed.as_text(msgspec.structs.replace(manifest, files={"delta.rfd": hashed}))
    (path / "manifest.json").write_bytes(text)
    pulled = await world.check()
    assert (pulled.version, pulled.transfer.kind, pulled.transfer.versions) == (3, "full", 0)


async def test_a_damaged_whole_version_is_gone_around(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=2)
    world.trainer.publish(3)
    world.damage(2, "model.safetensors")
    pulled = await world.check()
    assert (pulled.transfer.kind, pulled.transfer.versions) == ("full", 2)


async def test_without_a_way_the_cause_is_told_and_what_is_held_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.trainer.publish(1)
    world.damage(2, "delta.rfd")
    with pytest.raises(CorruptData, match=r"delta\.rfd"):
        await world.puller.pull()
    world.source.took()
    with pytest.raises(WeightsError):  # and it is not read again at once
        await world.puller.pull()
    assert world.source.took() == []
    world.damage(2, "delta.rfd")  # as it was
    world.clock.time += pull.AVOID_SECONDS + 1
    assert (await world.check()).transfer.kind == "delta"


async def test_nothing_published_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.puller.head() is None
    with pytest.raises(WeightsError, match="published yet"):
        await world.puller.pull()


async def test_a_source_that_is_away_is_asked_again_later(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.trainer.publish(1)
    world.source.away = Unavailable("no way there")
    with pytest.raises(Unavailable):
        await world.puller.pull()
    world.source.away = None
    world.source.before = lambda version, name: setattr(world.source, "away", Unavailable("it broke off"))
    with pytest.raises(Unavailable):
        await world.puller.pull()
    assert 2 not in world.source.forgotten  # the received part is not lost
    world.source.away, world.source.before = None, lambda version, name: None
    assert (await world.check()).transfer.kind == "delta"


async def test_versions_pruned_on_the_way(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=4)
    world.trainer.publish(1)
    await world.check()
    world.trainer.publish(3)

    def prune(version: int, name: str) -> None:
        world.source.before = lambda version, name: None
        world.trainer.publish(3)
        world.store.prune(1)
        assert not world.store.path(1).exists()

    world.source.before = prune
    pulled = await world.check()
    assert (pulled.version, pulled.transfer.kind) == (6, "full")


async def test_the_line_goes_back_on_the_way(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.trainer.publish(2)

    def rewind(version: int, name: str) -> None:
        world.source.before = lambda version, name: None
        world.trainer.rewind(2)
        assert world.trainer.publish(1) == 4

    world.source.before = rewind
    pulled = await world.check()
    assert pulled.version == 4
    assert pulled.transfer.versions == 2  # versions 2 and 4: orphaned ones are not in the chain


async def test_from_an_orphan_back_to_the_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(4)
    await world.check()
    world.trainer.rewind(1)
    back = await world.check()
    assert (back.version, back.patch) == (1, None)
    assert world.trainer.publish(1) == 4
    assert (await world.check()).transfer.kind == "delta"


async def test_a_version_written_again_with_other_bits(tmp_path: Path) -> None:
    """A trainer that repairs a version may have computed it again on another machine."""
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.damage(1, "delta.rfd")
    world.trainer.change()
    world.store.rewind(1)
    assert world.store.mend(world.trainer.weights, 1)
    world.trainer.publish(1)  # a delta of what is version 1 now
    pulled = await world.check()
    assert (pulled.version, pulled.transfer.kind) == (2, "full")


async def test_a_new_node_takes_the_root_from_its_model(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(3)
    asked: list[int] = []

    def initial() -> dict[str, torch.Tensor]:
        asked.append(1)
        return {name: tensor.clone() for name, tensor in world.trainer.published[0].items()}

    world.puller = Puller(world.source, initial=initial)
    pulled = await world.check()
    assert pulled.patch is not None
    assert (pulled.patch.base, pulled.transfer.kind, asked) == (0, "delta", [1])
    assert sorted(world.source.took()) == [(1, "delta.rfd"), (2, "delta.rfd")]
    await world.check()
    assert asked == [1]


async def test_a_model_that_is_not_the_root_is_not_taken_for_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(3)
    world.puller = Puller(world.source, initial=lambda: dict(world.trainer.published[1]))
    assert (await world.check()).transfer.kind == "full"


async def test_adapters_are_merged_into_a_base_that_is_pulled_once(tmp_path: Path) -> None:
    trainer, source = Trainer(tmp_path), Source(tmp_path)
    trainer.publish(1)
    puller = Puller(source)
    for version in (1, 2):
        low = {"up.lora_A": torch.full((2, 32), 0.1 * version), "up.lora_B": torch.ones(128, 2)}
        trainer.store.publish_adapter(Adapter(low, rank=2, alpha=4.0), version, version - 1, 0)
        pulled = await puller.pull()
        assert (pulled.version, pulled.patch) == (version, None)
        assert same(dict(pulled.tensors), trainer.store.pull(version))
        expected = [(version, "adapter.safetensors")] + ([(0, "model.safetensors")] if version == 1 else [])
        assert source.took() == expected


async def test_an_engine_that_holds_the_base_gets_the_adapter_alone(tmp_path: Path) -> None:
    trainer, source = Trainer(tmp_path), Source(tmp_path)
    trainer.publish(1)
    puller = Puller(source)
    low = {"up.lora_A": torch.full((2, 32), 0.1), "up.lora_B": torch.ones(128, 2)}
    trainer.store.publish_adapter(Adapter(low, rank=2, alpha=4.0), 1, 0, 0)
    pulled = await puller.pull(base=0)
    assert pulled.adapter is not None
    assert same(dict(pulled.adapter.tensors), low)
    assert (pulled.adapter.rank, pulled.adapter.alpha, pulled.tensors, pulled.patch) == (2, 4.0, {}, None)
    transfer = pulled.transfer
    assert (transfer.version, transfer.base, transfer.kind, transfer.by_engine) == (1, 0, "adapter", True)
    assert transfer.bytes == trainer.store.line().entries[1].full_bytes
    assert "added by the engine" in str(transfer)
    assert source.took() == [(1, "adapter.safetensors")], "the base is not read"
    assert source.forgotten == [1]
    for other in (1, -1, None):
        merged_on_host = await puller.pull(base=other)
        assert merged_on_host.adapter is None
        assert same(dict(merged_on_host.tensors), trainer.store.pull(1))
    trainer.store.rewind(0)
    assert (await puller.pull(base=0)).adapter is None, "version 0 is whole"


async def test_a_pull_that_is_cancelled_leaves_something_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(1)
    await world.check()
    world.trainer.publish(20)
    for turns in range(0, 120, 3):
        task = asyncio.ensure_future(world.puller.pull())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.check()


async def test_changed_returns_when_there_is_news(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainer.publish(1)
    assert await world.puller.head() == 0
    waiting = asyncio.create_task(world.puller.changed(60.0))
    await asyncio.sleep(0)
    world.trainer.publish(1)
    async with asyncio.timeout(20):
        await waiting
    assert await world.puller.head() == 1


async def test_a_line_that_says_something_else_than_a_manifest(tmp_path: Path) -> None:
    """A server's stale view of a version that was written again meanwhile: no chain, but an answer."""
    world = World(tmp_path)
    world.trainer.publish(2)
    await world.check()
    world.trainer.publish(2)
    path = world.store.path(2)
    text = sealed.as_text(msgspec.structs.replace(world.store.manifest(2), delta_of=0))
    (path / "manifest.json").write_bytes(text)
    async with asyncio.timeout(30):
        with pytest.raises(WeightsError, match="needs version 0, not 1"):
            await world.puller.pull()


async def test_an_adapter_that_is_orphaned_on_the_way(tmp_path: Path) -> None:
    trainer, source = Trainer(tmp_path), Source(tmp_path)
    trainer.publish(1)
    low = {"up.lora_A": torch.full((2, 32), 0.1), "up.lora_B": torch.ones(128, 2)}
    for version in (1, 2):
        trainer.store.publish_adapter(Adapter(low, rank=2, alpha=4.0), version, version - 1, 0)

    def rewind(version: int, name: str) -> None:
        source.before = lambda version, name: None
        trainer.store.rewind(1)

    for base in (None, 0):
        trainer.store.rewind(1)
        version = max(trainer.store.versions()) + 1
        trainer.store.publish_adapter(Adapter(low, rank=2, alpha=4.0), version, 1, 0)
        source.before = rewind
        assert (await Puller(source).pull(base=base)).version == 1


async def test_what_a_new_node_fetches_is_told_and_not_pruned_under_it(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot_every=4)
    told: list[int] = []

    @asynccontextmanager
    async def word(version: int) -> AsyncIterator[None]:
        told.append(version)
        yield

    world.puller = Puller(world.source, clock=world.clock, announce=word)
    world.trainer.publish(3)

    def prune(version: int, name: str) -> None:
        world.source.before = lambda version, name: None
        world.trainer.publish(9)
        world.store.prune(1, in_use=told)

    world.source.before = prune
    pulled = await world.puller.pull()
    assert (pulled.version, told) == (2, [2])  # as it was planned, though the trainer went on
    assert same(dict(pulled.tensors), world.trainer.published[2])
    assert (await world.check()).transfer.kind == "delta"
    assert told == [2]  # its served version keeps the chain to the newest
