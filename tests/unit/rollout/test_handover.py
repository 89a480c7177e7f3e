"""A node whose trainer is in the same process samples between `begin` and `end`, with the weights it was handed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from counting_engine import CountingEngine, request, until
from rillflow.config.load import validate
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import EngineService
from rillflow.errors import WeightsError
from rillflow.gateway.node_engines import NodeEngines, node_engines
from rillflow.rollout.handover import HandedWeights, Handover, NodeClock
from rillflow.types import Chunk, EngineInfo, Engines, LookEngines, Probe
from rillflow.weights.models import load_policy_model
from rillflow.weights.probe import FP32, prompts

Weights = dict[str, torch.Tensor]
TOKEN = "t" * 32


@pytest.fixture(scope="module")
def weights() -> Weights:
    return dict(load_policy_model("tiny", "fp32", torch.device("cpu")).state_dict())


class World:
    """Real engines, and what a handover sees of the node's episodes."""

    def __init__(self, folder: Path, *, move: bool = False, free: bool = False, roster: Any = None) -> None:
        (folder / "prompts.jsonl").write_text('{"id": "0"}\n')
        recipe = validate(
            {
                "name": "n",
                "policies": {"p": {"model": "tiny", "engine": {"context": 512, "slots": 4}}},
                "workflow": "rillflow.examples.stockroom:play",
                "data": {"prompts": {"path": str(folder / "prompts.jsonl")}},
                "rollout": {"engines": 0 if roster is None else 1},
            }
        )
        self.woken = 0
        self.handover = Handover("p", move=move, free=free)
        self.engines: NodeEngines = node_engines(
            recipe,
            name="node",
            token=TOKEN,
            weights=folder / "weights",
            roster=roster,
            stores={"p": self.handover.weights},
            hosted=True,
        )
        self.episodes: Any = SimpleNamespace(resting=False, on_room=self.wake)

    def wake(self) -> None:
        self.woken += 1

    @property
    def sampled(self) -> int:
        return int(self.engines.stats()["p.generated_tokens"])

    @property
    def cache_bytes(self) -> int:
        host: Any = self.engines.fleet.members["node"].engine
        return int(host.engines["p"].cache_bytes)

    async def answer(self, count: int = 20) -> list[Chunk]:
        return [chunk async for chunk in self.engines.pools["p"].generate(request(count=count))]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@asynccontextmanager
async def worlds(folder: Path, **settings: Any) -> AsyncIterator[World]:
    world = World(folder, **settings)
    await world.engines.start()
    await world.handover.attach(world.engines, world.episodes)
    yield world
    await world.engines.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with worlds(tmp_path) as world:
        yield world


async def test_a_node_rests_until_it_is_told_to_begin(world: World, weights: Weights) -> None:
    asked = asyncio.create_task(world.answer())
    await asyncio.sleep(0.1)
    assert world.episodes.resting
    assert world.sampled == 0
    await world.handover.begin(weights, 7)
    chunks = await asyncio.wait_for(asked, 20)
    assert {chunk.version for chunk in chunks} == {7}
    assert not world.episodes.resting
    assert world.woken == 1


async def test_an_answer_that_is_cut_goes_on_under_the_next_weights(world: World, weights: Weights) -> None:
    await world.handover.begin(weights, 1)
    asked = asyncio.create_task(world.answer(480))
    await until(lambda: world.sampled > 20)
    await world.handover.end()
    cut = world.sampled
    await asyncio.sleep(0.1)
    assert world.sampled == cut < 480
    assert world.episodes.resting
    other = {name: tensor * 1.01 for name, tensor in weights.items()}
    await world.handover.begin(other, 2)
    chunks = await asyncio.wait_for(asked, 60)
    versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
    assert versions == [1] * cut + [2] * (len(versions) - cut)
    assert any(chunk.seam for chunk in chunks)


async def test_the_trainer_may_change_what_it_has_handed_over(world: World, weights: Weights) -> None:
    mine = {name: tensor.clone() for name, tensor in weights.items()}
    await world.handover.begin(mine, 1)
    expected = await world.answer()
    await world.handover.end()
    for tensor in mine.values():
        tensor.zero_()
    await world.handover.begin(mine, 1)  # the version that it has already: nothing is copied
    assert tokens_of(await world.answer()) == tokens_of(expected)


async def test_weights_that_do_not_fit_are_refused_and_nothing_is_sampled(world: World, weights: Weights) -> None:
    with pytest.raises(WeightsError, match="serves version 0, not version 3"):
        await world.handover.begin({name: tensor.half() for name, tensor in weights.items()}, 3)
    assert world.episodes.resting


async def test_a_node_that_has_ended_is_left_alone(world: World, weights: Weights) -> None:
    world.handover.detach()
    await world.handover.begin(weights, 3)
    await world.handover.end()
    assert world.engines.versions() == {"p": 0}


@pytest.mark.parametrize("when", ["refresh", "release"])
async def test_a_node_may_end_while_weights_are_handed_over(
    world: World, weights: Weights, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has ended: the weights that its last trainer hands over for an evaluation have no receiver."""
    of = world.engines if when == "refresh" else world.engines.fleet.members["node"].engine
    whole = getattr(of, when)

    async def ending(*given: Any) -> None:
        world.handover.detach()
        await (world.engines.close() if when == "refresh" else whole(*given))

    monkeypatch.setattr(of, when, ending)
    await world.handover.begin(weights, 3)
    await world.handover.end()


def test_handed_weights_are_there_until_they_are_taken(weights: Weights) -> None:
    store = HandedWeights()
    assert (store.head(), store.versions()) == (None, [])
    store.publish(weights, 4, None)
    assert (store.head(), store.versions(), store.rewind(4)) == (4, [4], [])
    assert store.pull(4) == weights
    with pytest.raises(WeightsError, match="version 3"):
        store.pull(3)
    store.taken()
    with pytest.raises(WeightsError, match="version 4"):
        store.pull(4)


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return 1000.0 + self.time

    def monotonic(self) -> float:
        return self.time


def test_a_node_clock_stands_still_while_it_is_stopped() -> None:
    real = Clock()
    clock = NodeClock(real)
    real.time = 103.0
    assert clock.monotonic() == 103.0
    clock.stop()
    clock.stop()
    real.time = 110.0
    assert (clock.monotonic(), clock.now()) == (103.0, 1110.0)
    clock.go()
    clock.go()
    real.time = 111.0
    assert clock.monotonic() == 104.0


async def test_time_stands_still_while_training_has_paused_the_node(world: World, weights: Weights) -> None:
    clock = world.handover.clock
    before = clock.monotonic()
    await asyncio.sleep(0.02)
    assert clock.monotonic() == before, "it rests until it is told to begin"
    await world.handover.begin(weights, 1)
    await asyncio.sleep(0.02)
    assert clock.monotonic() > before
    await world.handover.end()
    paused = clock.monotonic()
    await asyncio.sleep(0.02)
    assert clock.monotonic() == paused


async def test_an_answer_that_is_paused_moves_nowhere_and_its_cache_can_be_freed(
    tmp_path: Path, weights: Weights
) -> None:
    async with worlds(tmp_path, free=True, move=True) as world:
        await world.handover.begin(weights, 1)
        asked = asyncio.create_task(world.answer(400))
        await until(lambda: world.sampled > 20)
        assert world.cache_bytes > 0
        await world.handover.end()
        assert world.cache_bytes == 0
        stopped = world.handover.clock.monotonic()
        await asyncio.sleep(0.02)
        assert world.handover.clock.monotonic() == stopped, "nobody was there to take it: it waits"
        assert not asked.done()
        await world.handover.begin(weights, 1)
        chunks = await asyncio.wait_for(asked, 60)
    assert len(tokens_of(chunks)) == 400
    assert {chunk.version for chunk in chunks} == {1}


async def test_an_answer_that_is_moved_goes_on_at_once_elsewhere(tmp_path: Path, weights: Weights) -> None:
    other = CountingEngine(version=0)
    service = EngineService(EngineHost("engine-0", {"p": other}), TOKEN)
    url = await service.start()
    info = EngineInfo(name="engine-0", url=url, versions={"p": 0}, context=4096, slots=4, paused="not yet")

    async def roster(ask: LookEngines) -> Engines:
        return Engines(engines=[info])

    try:
        async with worlds(tmp_path, move=True, roster=roster) as world:
            await world.handover.begin(weights, 1)
            asked = asyncio.create_task(world.answer(400))
            await until(lambda: world.sampled > 20)
            info = msgspec.structs.replace(info, paused="")
            await world.engines.look()
            before = world.handover.clock.monotonic()
            await world.handover.end()
            new = await asyncio.wait_for(world.answer(5), 60)
            chunks = await asyncio.wait_for(asked, 60)
            assert world.handover.clock.monotonic() > before, "its episodes go on, and so does their time"
            cut = world.sampled
            assert world.episodes.resting, "but it takes no new tasks"
            assert set(world.engines.stats()) > {"engines", "p.generated_tokens"}
            await world.handover.begin(weights, 2)
            back = await asyncio.wait_for(world.answer(5), 60)
    finally:
        await service.stop()
    versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
    assert versions == [1] * cut + [0] * (400 - cut)
    assert [chunk.seam for chunk in chunks if chunk.seam] == ["preempted"]
    assert {chunk.version for chunk in new} == {0}
    assert {chunk.version for chunk in back} == {2}, "a group's versions do not go back"


def probe_of(weights: Weights) -> Probe:
    model = load_policy_model("tiny", "fp32", torch.device("cpu"))
    model.load_state_dict(weights)
    ids_RT = torch.tensor(prompts(model.config.vocab_size, 512))
    with torch.no_grad():
        logprob_RTV = model(ids_RT).logits[:, :-1].log_softmax(-1)
    logprobs = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return Probe(prompts=ids_RT.tolist(), logprobs=logprobs, tolerance=FP32)


async def test_weights_that_are_handed_over_must_prove_right(world: World, weights: Weights) -> None:
    """Version 0 too, which the engine has from its own files."""
    torch.manual_seed(0)
    noise = {tensor.data_ptr(): 0.5 * tensor.std() * torch.randn_like(tensor) for tensor in weights.values()}
    other = {name: tensor + noise[tensor.data_ptr()] for name, tensor in weights.items()}
    asked = asyncio.create_task(world.answer())
    with pytest.raises(WeightsError, match="serves version -1, not version 0") as caught:
        await world.handover.begin(weights, 0, probe_of(other))
    assert "wrong weights" in caught.value.hint
    assert world.sampled == 0
    await world.handover.begin(other, 1, probe_of(other))
    assert {chunk.version for chunk in await asyncio.wait_for(asked, 60)} == {1}
