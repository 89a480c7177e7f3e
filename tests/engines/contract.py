"""The Engine contract on a real server: what holds for every kind of it. A module that runs it imports all of this and
of `contract_logprobs`, and gives a fixture `world`, once with tied and once with untied embeddings."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_world import (
    CONTEXT,
    World,
    ask,
    check,
    logprobs,
    plain,
    probe_of,
    prompt,
    request,
    tokens,
    untied,
    versions,
)

from counting_engine import until
from playing import play_episodes
from rillflow.config import SamplingConfig
from rillflow.contracts import Change, Patch
from rillflow.engine.servers.weights import lay_changes
from rillflow.errors import ContextOverflow, EngineError, EngineLost, WeightsError
from rillflow.gateway.trees.record import Sample
from rillflow.types import Chunk, Probe
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.probe import ProbeMismatch
from rillflow.weights.pull import Pulled, Puller, Transfer
from rillflow.weights.refresh import Refresher
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

# ---------------------------------------------------------------- sampling


@untied
async def test_stop_tokens_and_the_context_end_an_answer(world: World) -> None:
    asked = prompt(30)
    free = tokens(await ask(world.engine, asked, temperature=0.0, max_tokens=30))
    stop = free[11]
    ended = await ask(world.engine, asked, temperature=0.0, max_tokens=30, stop_tokens=(stop, 3_000_000_000))
    assert tokens(ended) == free[: free.index(stop) + 1]
    assert ended[-1].finish == "stop"
    full = await ask(world.engine, prompt(CONTEXT - 3), max_tokens=50)
    assert (len(tokens(full)), full[-1].finish) == (3, "length")
    with pytest.raises(ContextOverflow):
        world.engine.generate(request(prompt(CONTEXT)))
    with pytest.raises(EngineError):
        world.engine.generate(request([734]))


@untied
async def test_answers_come_in_pieces_and_closing_aborts(world: World) -> None:
    # So many that one of them takes seconds: where this process gets no turn for long, pieces come joined.
    streams = [world.engine.generate(request(prompt(30, seed), max_tokens=280)) for seed in range(32)]
    firsts = await asyncio.gather(*(anext(stream) for stream in streams))
    assert any(first.finish is None for first in firsts)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: world.engine.stats().running == 0)
    assert len(tokens(await ask(world.engine, prompt(5)))) == 20


@untied
async def test_pause_stops_sampling_and_resume_goes_on(world: World) -> None:
    asked = prompt(30, seed=3)
    task = asyncio.create_task(ask(world.engine, asked, max_tokens=120))
    before = world.engine.stats().generated_tokens
    await until(lambda: world.engine.stats().generated_tokens > before + 10)
    await world.engine.pause()
    held = world.engine.stats().generated_tokens
    await asyncio.sleep(0.3)
    assert world.engine.stats().generated_tokens == held
    await world.engine.resume()
    chunks = await task
    assert len(tokens(chunks)) == 120
    check(world, asked, chunks)


# ---------------------------------------------------------------- weights


async def test_versions_are_exact_while_weights_change_under_running_answers(world: World) -> None:
    answers: list[tuple[list[int], list[Chunk]]] = []
    enough = asyncio.Event()

    async def keep_asking(place: int) -> None:
        while not enough.is_set():
            asked = prompt(20 + place, seed=place)
            answers.append((asked, await ask(world.engine, asked, max_tokens=100)))

    started = world.version
    tasks = [asyncio.create_task(keep_asking(place)) for place in range(12)]
    for change in (world.load, world.patch, lambda: world.patch(1.0), world.patch):
        before = world.engine.stats().generated_tokens
        await until(lambda before=before: world.engine.stats().generated_tokens > before + 100, 60)
        await change()
    enough.set()
    await asyncio.gather(*tasks)
    seen = {version for _, chunks in answers for version in versions(chunks)}
    assert seen == set(range(started, world.version + 1))
    assert any(len(set(versions(chunks))) > 1 for _, chunks in answers)
    for asked, chunks in answers:
        assert len(tokens(chunks)) == 100
        assert versions(chunks) == sorted(versions(chunks))
        seams = [chunk.version for chunk in chunks if chunk.seam]
        assert seams == sorted(set(versions(chunks)))[1:], "a seam where a version begins, and nowhere else"
        check(world, asked, chunks)


@untied
async def test_the_prefix_cache_serves_a_version_and_does_not_cross_into_the_next(world: World) -> None:
    asked = prompt(290, seed=9)
    await ask(world.engine, asked, max_tokens=5)
    before = world.engine.stats().reused_tokens
    check(world, asked, await ask(world.engine, asked, max_tokens=20))
    assert world.engine.stats().reused_tokens > before
    await world.load()
    before = world.engine.stats().reused_tokens
    check(world, asked, await ask(world.engine, asked, max_tokens=20))
    assert world.engine.stats().reused_tokens == before
    await world.patch()
    check(world, asked, await ask(world.engine, asked, max_tokens=20))


@untied
async def test_episodes_play_through_the_gateway_while_weights_change(world: World) -> None:
    """The agent's calls leave exactly the sampled tokens, with their versions and log-probs."""
    samples: list[Sample] = []
    enough = asyncio.Event()

    async def keep_playing() -> None:
        while not enough.is_set():
            samples.extend(await play_episodes(world.engine, SamplingConfig(max_tokens=48), 8))

    async def sampled() -> None:
        before = world.engine.stats().generated_tokens
        await until(lambda: world.engine.stats().generated_tokens > before + 100, 60)

    player = asyncio.create_task(keep_playing())
    started = world.version
    for change in (world.patch, world.load, world.patch):
        await sampled()
        await change()
    await sampled()
    enough.set()
    await player
    claimed = {int(version) for sample in samples for version in sample.columns["versions"] if version >= 0}
    assert claimed == set(range(started, world.version + 1))
    for sample in samples:
        ids = sample.columns["tokens"].tolist()
        for version in claimed:
            places = [place for place, other in enumerate(sample.columns["versions"]) if other == version]
            expected = plain(world.models[version], ids[:1], ids[1:])
            found = [float(sample.columns["logprobs"][place]) for place in places]
            assert found == pytest.approx([expected[place - 1] for place in places], abs=2e-4)


async def test_workers_decode_published_deltas(world: World, tmp_path: Path) -> None:
    """From a trainer's store into the fused parameters of the server; nothing is decoded on the way."""
    store = FolderStore(tmp_path, deltas=True)
    store.publish(world.model.state_dict(), world.version, None, probe_of(world.model))
    puller = Puller(FolderSource(tmp_path))
    refresher = Refresher("p", world.engine, puller, doubts=True)
    asked = prompt(30)
    for share, count in ((0.02, 1), (0.3, 2)):
        for _ in range(count):
            world.changed(share)
            version = world._next()
            store.publish(world.model.state_dict(), version, version - 1, probe_of(world.model))
        assert await refresher.refresh()
        chunks = await ask(world.engine, asked)
        assert set(versions(chunks)) == {version}
        check(world, asked, chunks)
        done = refresher.transfers.last[-1]
        assert (done.kind, done.versions, done.by_engine) == ("delta", count, True)
        assert world.engine.update_seconds.keys() == {"settle", "ready", "cut", "apply", "decode", "verify", "probe"}
    name = "model.layers.1.self_attn.k_proj.weight"
    laid = lay_changes({name: Change(torch.tensor([77]), torch.tensor([123.0]))}, {})
    await world.write([str(path) for path in laid.folder.iterdir()])
    laid.remove()
    world.changed(0.02)
    version = world._next()
    store.publish(world.model.state_dict(), version, version - 1, probe_of(world.model))
    assert await refresher.refresh()
    assert not refresher.transfers.last[-1].by_engine, "a wrong weight in the server was noticed: it got all of them"
    check(world, asked, await ask(world.engine, asked))


async def test_weights_that_do_not_fit_change_nothing(world: World) -> None:
    good = world.model.state_dict()
    for wrong in (good | {"other": torch.ones(1)}, {"model.norm.weight": good["model.norm.weight"]}):
        with pytest.raises(WeightsError):
            await world.engine.load(wrong, 99)
    with pytest.raises(WeightsError, match="version 77"):
        await world.engine.patch(Patch(77, {}, {}), 78)
    asked = prompt(30)
    chunks = await ask(world.engine, asked)
    assert set(versions(chunks)) == {world.version}
    check(world, asked, chunks)


async def test_a_wrong_weight_in_the_server_is_noticed(world: World) -> None:
    """One value, written past us into a fused projection."""
    name = "model.layers.1.self_attn.k_proj.weight"
    laid = lay_changes({name: Change(torch.tensor([77]), torch.tensor([123.0]))}, {})
    await world.write([str(path) for path in laid.folder.iterdir()])
    laid.remove()
    with pytest.raises(WeightsError, match="k_proj"):
        await world.patch()
    assert world.engine.version == -1
    late = asyncio.create_task(ask(world.engine, prompt(30)))
    await asyncio.sleep(0.2)
    assert not late.done(), "nothing is sampled from it"
    await world.reload()
    check(world, prompt(30), await late)


# ---------------------------------------------------------------- probes


class Given:
    """Gives an engine these tensors as the next version, with the probe of the model that they should be of."""

    def __init__(self, world: World, tensors: Any) -> None:
        self._version = world.version
        self._tensors = tensors
        self._models = world.models

    async def head(self) -> int:
        return self._version

    async def pull(self, serves: int | None = None, base: int | None = None) -> Pulled:
        transfer = Transfer(self._version, None, "full", 1, 0, 0.0, 0.0)
        return Pulled(self._version, self._tensors, None, transfer, probe_of(self._models[self._version]))

    async def probe(self, version: int) -> Probe:
        return probe_of(self._models[version])

    async def changed(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


def tensor_left_stale(old: Any, new: Any) -> Any:
    name = "model.layers.1.mlp.down_proj.weight"
    return new | {name: old[name]}


def tensors_swapped(old: Any, new: Any) -> Any:
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    return new | {first: new[second], second: new[first]}


def of_another_model(old: Any, new: Any) -> Any:
    generator = torch.Generator().manual_seed(77)
    # Tied weights stay tied.
    drawn = {one.data_ptr(): 0.2 * torch.randn(one.shape, generator=generator) for one in new.values()}
    return {name: drawn[one.data_ptr()] for name, one in new.items()}


def adapter_not_delivered(old: Any, new: Any) -> Any:
    """A LoRA policy's version is its base's weights with the adapter in them."""
    return old


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (tensor_left_stale, "wrong weights"),
        (tensors_swapped, "wrong weights"),
        (of_another_model, "wrong weights"),
        (adapter_not_delivered, "stale weights: the engine still computes with version"),
    ],
)
async def test_weights_that_are_not_the_trainers_are_caught_before_they_serve(
    world: World, spoil: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes arrive as they were sent: fingerprints find nothing wrong with them."""
    old = world.models[world.version].state_dict()
    world.changed(1.0)
    version = world._next()
    refresher = Refresher("p", world.engine, Given(world, spoil(old, world.model.state_dict())), doubts=True)
    assert not await refresher.refresh()
    assert f"version {version} is not served, {cause}" in refresher.trouble
    assert f"version {version} not loaded, the engine samples nothing" in caplog.text
    assert (world.engine.version, world.engine.proven) == (-1, False)
    late = asyncio.create_task(ask(world.engine, prompt(30)))
    await asyncio.sleep(0.2)
    assert not late.done(), "nothing is sampled from it"
    good = Refresher("p", world.engine, Given(world, world.model.state_dict()), doubts=True)
    assert await good.refresh()
    chunks = await late
    assert set(versions(chunks)) == {version}
    check(world, prompt(30), chunks)


async def test_a_tensor_that_an_update_does_not_name_is_proven_too(world: World) -> None:
    """The fingerprints of an update are those of the tensors that it changes. Only a probe sees other tensors that the
    server computes with, such as derived ones."""
    name = "model.layers.1.self_attn.k_proj.weight"
    laid = lay_changes({name: Change(torch.arange(4096), torch.full((4096,), 0.7))}, {})
    await world.write([str(path) for path in laid.folder.iterdir()])
    laid.remove()
    before = world.version
    with torch.no_grad():
        world.model.model.norm.weight.mul_(1.01)
    weight = world.model.model.norm.weight.data
    changes = {"model.norm.weight": Change(None, weight.clone())}
    patch = Patch(before, changes, {"model.norm.weight": fingerprint(weight)})
    with pytest.raises(ProbeMismatch, match="wrong weights"):
        await world.engine.patch(patch, world._next(), probe_of(world.model))
    assert world.engine.version == -1
    await world.reload()
    check(world, prompt(30), await ask(world.engine, prompt(30)))


# ---------------------------------------------------------------- the server


@untied
async def test_a_server_that_runs_already_is_used(world: World) -> None:
    other = world.make(world.settings.model_copy(update={"server": world.running()}))
    await other.start()
    asked = prompt(30)
    chunks = await ask(other, asked)
    assert logprobs(chunks) == pytest.approx(plain(world.models[0], asked, tokens(chunks)), abs=2e-4)
    await other.close()
    await world.reload()
    check(world, asked, await ask(world.engine, asked))


@untied
async def test_a_killed_server_comes_back_with_its_weights(world: World) -> None:
    process: Any = world.engine.process
    # More than it can have answered when the signal comes, however busy the machine is.
    tasks = [asyncio.create_task(ask(world.engine, prompt(30, seed), max_tokens=280)) for seed in range(128)]
    before = world.engine.stats().generated_tokens
    await until(lambda: world.engine.stats().generated_tokens > before)
    os.kill(process.pid, signal.SIGKILL)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(one, EngineLost) for one in ended)
    assert all(isinstance(one, EngineLost | list) for one in ended)
    await until(lambda: world.engine.process is not process and world.engine.version == 0, 600)
    await until(lambda: "down" not in world.engine._calls.held, 600)
    asked = prompt(30)
    late = asyncio.create_task(ask(world.engine, asked))
    await world.reload()
    chunks = await late
    assert set(versions(chunks)) == {world.version}
    check(world, asked, chunks)
