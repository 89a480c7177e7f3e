"""A real vLLM that holds a base and gets published adapters: every version is that of the merged model."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
import torch
from contract_world import CONTEXT, World, ask, check, logprobs, plain, probe_of, prompt, tokens, versions

from counting_engine import until
from rillflow.config import LoraConfig, PolicyConfig, TrainerConfig
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.servers import ServerEngine, adding
from rillflow.engine.servers.adapters import SLOTS, lay_adapter, plan_adapters
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import model_facts
from rillflow.types import Chunk
from rillflow.weights.codec import LORA_A, LORA_B, Adapter, merged
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

RANK, ALPHA = 4, 12.0


class AdapterWorld(World):
    """A trainer's store beside a server; versions above 0 are adapters of it."""

    kind = "vllm"
    arguments: ClassVar = []

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder, python, tied=True)
        self.store = FolderStore(folder / "weights")
        self.store.publish(self.model.state_dict(), 0, None, probe_of(self.model))
        self.refresher = Refresher("p", self.engine, Puller(FolderSource(folder / "weights")), doubts=True)

    def make(self, settings: EngineConfig) -> ServerEngine:
        facts = model_facts(str(self.folder / "model"), "fp32")
        settings = settings.model_copy(update={"server": settings.server.model_copy(update={"adapters": "native"})})
        policy = PolicyConfig(
            model=str(self.folder / "model"),
            engine=settings,
            trainer=TrainerConfig(lora=LoraConfig(rank=RANK, alpha=ALPHA)),
        )
        return VllmEngine(facts, settings, logs=self.folder, adapters=plan_adapters(policy, facts))

    async def write(self, paths: list[str]) -> None:
        raise NotImplementedError

    def running(self) -> ServerConfig:
        raise NotImplementedError

    def adapter(self, seed: int) -> Adapter:
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: self.engine.model.shapes[f"{name}.weight"] for name in self.engine.model.linears}
        tensors = {}
        for name, (rows, columns) in shapes.items():
            tensors[f"{name}.weight{LORA_A}"] = 0.2 * torch.randn(RANK, columns, generator=generator)
            tensors[f"{name}.weight{LORA_B}"] = 0.2 * torch.randn(rows, RANK, generator=generator)
        return Adapter(tensors, RANK, ALPHA)

    def publish(self, adapter: Adapter, probe: Any = None) -> int:
        """Publish the next version; return its number."""
        base = self.models[0]
        model = copy.deepcopy(base)
        with torch.no_grad():
            for name, tensor in merged(base.state_dict(), adapter).items():
                model.get_parameter(name).copy_(tensor)
        self.version += 1
        self.models[self.version] = model
        self.store.publish_adapter(adapter, self.version, self.version - 1, 0, probe or probe_of(model))
        return self.version

    async def deliver(self, seed: int) -> int:
        version = self.publish(self.adapter(seed))
        assert await self.refresher.refresh()
        return version

    @property
    def kinds(self) -> list[str]:
        return [transfer.kind for transfer in self.refresher.transfers.last]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[AdapterWorld]:
    world = AdapterWorld(tmp_path_factory.mktemp("adapters"), vllm_python)
    await world.engine.start()
    assert not await world.refresher.refresh(), "it starts with version 0"
    assert world.engine.proven
    yield world
    await world.engine.close()


async def test_three_versions_come_as_adapters_under_running_answers(world: AdapterWorld) -> None:
    answers: list[tuple[list[int], list[Chunk]]] = []
    enough = asyncio.Event()

    async def keep_asking(place: int) -> None:
        while not enough.is_set():
            asked = prompt(20 + place, seed=place)
            answers.append((asked, await ask(world.engine, asked, max_tokens=100)))

    tasks = [asyncio.create_task(keep_asking(place)) for place in range(8)]
    for seed in (1, 2, 3):
        before = world.engine.stats().generated_tokens
        await until(lambda before=before: world.engine.stats().generated_tokens > before + 100, 60)
        await world.deliver(seed)
        assert world.engine.update_seconds.keys() == {"settle", "ready", "cut", "apply", "add", "probe"}
    enough.set()
    await asyncio.gather(*tasks)
    assert world.kinds == ["adapter"] * 3
    assert {version for _, chunks in answers for version in versions(chunks)} == {0, 1, 2, 3}
    assert any(len(set(versions(chunks))) > 1 for _, chunks in answers), "an answer went on under another adapter"
    for asked, chunks in answers:
        assert len(tokens(chunks)) == 100
        seams = [chunk.version for chunk in chunks if chunk.seam]
        assert seams == sorted(set(versions(chunks)))[1:]
        check(world, asked, chunks)
    assert world.engine.base == 0


async def test_both_log_probs_are_those_of_the_adapter(world: AdapterWorld) -> None:
    asked = prompt(30, seed=5)
    chunks = await ask(world.engine, asked, temperature=0.6)
    model, answer = world.models[world.version], tokens(chunks)
    assert logprobs(chunks) == pytest.approx(plain(model, asked, answer, 0.6), abs=2e-4)
    assert logprobs(chunks, "raw_logprobs") == pytest.approx(plain(model, asked, answer), abs=2e-4)


async def test_the_prefix_cache_does_not_cross_from_one_adapter_into_the_next(world: AdapterWorld) -> None:
    asked = prompt(CONTEXT - 30, seed=9)
    await ask(world.engine, asked, max_tokens=5)
    before = world.engine.stats().reused_tokens
    check(world, asked, await ask(world.engine, asked, max_tokens=20))
    assert world.engine.stats().reused_tokens > before
    await world.deliver(4)
    before = world.engine.stats().reused_tokens
    check(world, asked, await ask(world.engine, asked, max_tokens=20))
    assert world.engine.stats().reused_tokens == before


async def test_two_adapters_are_resident_at_most(world: AdapterWorld) -> None:
    for seed in (5, 6, 7):
        before = world.engine.adapter
        await world.deliver(seed)
        assert not await world.engine._call("drop_adapter", before, deadline=60.0), "it was removed already"
    (layout,) = await world.engine._call("rillflow_layout", {}, "float32", {}, deadline=60.0)
    assert layout["adapters"]["slots"] == SLOTS + 1, "on a CPU one stays empty"
    assert set(world.kinds) == {"adapter"}


async def test_a_server_that_was_killed_gets_the_newest_adapter_again(world: AdapterWorld) -> None:
    asked = prompt(30, seed=6)
    os.kill(world.engine.process.pid, signal.SIGKILL)
    await until(lambda: world.engine._calls.held == {"weights"}, 300)
    assert world.engine.version == 0
    late = asyncio.create_task(ask(world.engine, asked))
    assert await world.refresher.refresh()
    chunks = await late
    assert set(versions(chunks)) == {world.version}
    check(world, asked, chunks)
    assert world.kinds[-1] == "adapter"


async def test_a_layer_that_does_not_hold_its_part_is_noticed(
    world: AdapterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM passes over layers that it does not know. The version is merged then, and nothing else is tried."""
    number = 12345

    async def other(self: Any, _: int, folder: str, file: str) -> list[str]:
        return await VllmEngine.add_adapter(self, number, folder, file)

    laid = lay_adapter(world.adapter(70), world.engine.model)
    stem = "adapter_model.safetensors"
    assert not await world.engine.add_adapter(number, str(laid.folder), str(laid.folder / stem))
    wrong = lay_adapter(world.adapter(71), world.engine.model)
    layers = await world.engine.add_adapter(number, str(wrong.folder), str(wrong.folder / stem))
    assert set(layers) == set(world.engine.model.linears), "the number is taken: vLLM keeps what it has"
    laid.remove()
    wrong.remove()
    await world.engine._call("drop_adapter", number, deadline=60.0)
    check(world, prompt(30), await ask(world.engine, prompt(30)))


async def test_a_probe_refuses_an_adapter_that_is_not_the_trainers(
    world: AdapterWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server holds what it was given, but that is not what was published. The merged weights serve instead, and
    later versions are merged too: the server no longer holds the base."""

    def swapped(adapter: Adapter, model: Any) -> Any:
        first, second = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
        other = {f"{first}{LORA_B}": f"{second}{LORA_B}", f"{second}{LORA_B}": f"{first}{LORA_B}"}
        return lay_adapter(
            Adapter({other.get(name, name): t for name, t in adapter.tensors.items()}, RANK, ALPHA), model
        )

    monkeypatch.setattr(adding, "lay_adapter", swapped)
    version = await world.deliver(80)
    assert f"merging the adapter of version {version} on the node's host" in caplog.text
    assert "is not served, wrong weights" in caplog.text
    chunks = await ask(world.engine, prompt(30))
    assert set(versions(chunks)) == {version}
    check(world, prompt(30), chunks)
    monkeypatch.undo()
    await world.deliver(81)
    check(world, prompt(30), await ask(world.engine, prompt(30)))
    assert world.kinds[-2:] == ["full", "full"]
    # The base again, as after a rewind of the store: adapters are added to it.
    await world.engine.load(world.models[0].state_dict(), 0, probe_of(world.models[0]))
    assert await world.refresher.refresh()
    assert world.kinds[-1] == "adapter"
    check(world, prompt(30), await ask(world.engine, prompt(30)))


async def test_a_wrong_version_samples_nothing(world: AdapterWorld) -> None:
    """An adapter whose probe is another version's: neither added nor merged does it reproduce that."""
    version = world.publish(world.adapter(90), probe_of(world.models[0]))
    assert not await world.refresher.refresh()
    assert f"version {version} is not served" in world.refresher.trouble
    assert (world.engine.version, world.engine.proven) == (-1, False)
    late = asyncio.create_task(ask(world.engine, prompt(30)))
    await asyncio.sleep(0.2)
    assert not late.done()
    await world.deliver(91)
    check(world, prompt(30), await late)
