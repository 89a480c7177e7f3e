"""`on_update: keep` on a real vLLM: weights change under running answers, and every token has the log-prob of what was
computed for it, by several versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import pytest_asyncio
import torch
from contract_world import ask, logprobs, probe_of, prompt, tokens, versions
from test_vllm_contract import VllmWorld
from transformers import DynamicCache

from counting_engine import until
from rillflow.types import Chunk
from rillflow.weights.probe import ProbeMismatch
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

LONG = 250


class KeepingWorld(VllmWorld):
    on_update: ClassVar[Literal["refill", "keep"]] = "keep"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[KeepingWorld]:
    world = KeepingWorld(tmp_path_factory.mktemp("keep"), vllm_python, tied=True)
    await world.start()
    yield world
    await world.engine.close()


@torch.no_grad()
def recomputed(world: KeepingWorld, asked: list[int], chunks: list[Chunk], temperature: float) -> list[float]:
    """The log-probs of an answer, each run of a version computed by that version, over what earlier ones have cached.
    After a seam all is computed again."""
    answer, cache, found = tokens(chunks), DynamicCache(), []
    given, at = list(asked), 0
    cuts = [seam for chunk in chunks for seam in [chunk.seam, *[""] * (len(chunk.tokens) - 1)][: len(chunk.tokens)]]
    runs = accumulate(map(bool, cuts))  # the number of seams until a token
    for (version, _), run in groupby(zip(versions(chunks), runs, strict=True)):
        count = len(list(run))
        if cuts[at]:
            given, cache = [*asked, *answer[:at]], DynamicCache()
        given += answer[at : at + count - 1]
        rows = world.models[version](torch.tensor([given]), past_key_values=cache).logits[0, -count:]
        drawn = torch.tensor(answer[at : at + count])
        found += (rows / temperature).log_softmax(-1).gather(1, drawn[:, None])[:, 0].tolist()
        at += count
        given = [answer[at - 1]]
    return found


def check(world: KeepingWorld, asked: list[int], chunks: list[Chunk], temperature: float) -> None:
    for kind, divided in (("logprobs", temperature), ("raw_logprobs", 1.0)):
        assert logprobs(chunks, kind) == pytest.approx(recomputed(world, asked, chunks, divided), abs=2e-4)


async def under_answers(
    world: KeepingWorld, *changes: Callable[[], Awaitable[Any]]
) -> list[tuple[list[int], list[Chunk], float]]:
    """Ask all the time, and make changes after some tokens each; the answers."""
    answers: list[tuple[list[int], list[Chunk], float]] = []
    enough = asyncio.Event()

    async def keep_asking(place: int) -> None:
        temperature = 1.0 if place % 2 else 0.7
        while not enough.is_set():
            asked = prompt(20 + place, seed=place)
            answers.append(
                (asked, await ask(world.engine, asked, max_tokens=LONG, temperature=temperature), temperature)
            )

    tasks = [asyncio.create_task(keep_asking(place)) for place in range(8)]
    for change in changes:
        before = world.engine.stats().generated_tokens
        await until(lambda before=before: world.engine.stats().generated_tokens > before + 150, 60)
        await change()
    enough.set()
    await asyncio.gather(*tasks)
    return answers


async def test_answers_go_on_and_every_token_is_of_its_version(world: KeepingWorld) -> None:
    started = world.version
    answers = await under_answers(world, world.patch, world.load, world.patch)
    seen = {version for _, chunks, _ in answers for version in versions(chunks)}
    assert seen == set(range(started, world.version + 1))
    assert max(len(set(versions(chunks))) for _, chunks, _ in answers) > 1
    assert {"settle", "ready", "apply", "verify", "probe"} <= world.engine.update_seconds.keys()
    assert "cut" not in world.engine.update_seconds
    for asked, chunks, temperature in answers:
        assert len(tokens(chunks)) == LONG
        assert versions(chunks) == sorted(versions(chunks))
        assert not any(chunk.seam for chunk in chunks)
        check(world, asked, chunks, temperature)


async def test_deltas_that_workers_decode_change_under_answers(world: KeepingWorld, tmp_path: Path) -> None:
    store = FolderStore(tmp_path, deltas=True)
    store.publish(world.model.state_dict(), world.version, None, probe_of(world.model))
    refresher = Refresher("p", world.engine, Puller(FolderSource(tmp_path)))

    async def update() -> None:
        world.changed(0.02)
        version = world._next()
        store.publish(world.model.state_dict(), version, version - 1, probe_of(world.model))
        assert await refresher.refresh()
        assert refresher.transfers.last[-1].by_engine

    for asked, chunks, temperature in await under_answers(world, update, update):
        assert not any(chunk.seam for chunk in chunks)
        check(world, asked, chunks, temperature)


async def test_answers_over_wrong_weights_begin_again_where_they_were_right(world: KeepingWorld) -> None:
    async def spoil() -> None:
        earlier = probe_of(world.model)
        world.changed(1.0)
        with pytest.raises(ProbeMismatch):
            await world.engine.load(world.model.state_dict(), world._next(), earlier)
        assert world.engine.version == -1
        await world.reload()

    answers = await under_answers(world, spoil, world.patch)
    assert {chunk.seam for _, chunks, _ in answers for chunk in chunks} == {"", "weights"}
    for asked, chunks, temperature in answers:
        assert len(tokens(chunks)) == LONG
        check(world, asked, chunks, temperature)
