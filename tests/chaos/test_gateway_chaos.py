"""Two engine processes under many streaming sessions: weights every 50 ms, a kill -9, a freeze. No agent notices."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from gateway_world import POLICY, World, world

from commands import Warm
from soak import repetitions

TURNS, TOKENS = 3, 80
SESSIONS, VERSIONS = repetitions((16, 6), (200, 20))
EVERY = 0.05  # seconds between two versions

Tokens = dict[str, dict[int, set[tuple[int, int]]]]


def logged(world: World) -> Tokens:
    """Return the engines' logs: by request and place, the tokens with their versions."""
    found: Tokens = defaultdict(lambda: defaultdict(set))
    for engine in world.engines:
        for life in range(1, engine.lives + 1):
            for request, place, version, tokens in engine.lines(life):
                for offset, token in enumerate(tokens):
                    found[request][place + offset].add((token, version))
    return found


def check_records(world: World, turns: int) -> None:
    """Each streamed text is that of the recorded tokens, and each of those was handed out by an engine."""
    engines = logged(world)
    hidden = set(world.renderer.stop_tokens)
    for session, texts in world.said.items():
        record = world.record(session)
        nodes = [node for node in record.trees[POLICY].nodes() if node.kind == "sampled"]
        assert len(nodes) == turns
        for node, text in zip(nodes, texts, strict=True):
            assert world.renderer.decode([token for token in node.tokens if token not in hidden]) == text
            assert node.parent is not None
            place = len(node.parent.prompt())
            for offset, drawn in enumerate(zip(node.tokens, node.versions, strict=True)):
                assert drawn in engines[node.call][place + offset], "no engine has handed out this token"
        (sample,) = record.samples(POLICY)
        versions = sample.columns["versions"][sample.columns["mask"] == 1]
        assert sample.trained == sum(len(node.tokens) for node in nodes)
        assert (np.diff(versions) >= 0).all(), versions
        assert sample.seams >= len(set(versions)) - turns, "a seam was not recorded"


async def keep_playing(
    world: World, http: aiohttp.ClientSession, number: int, stride: int, over: asyncio.Event, *, tokens: int = TOKENS
) -> None:
    """One session after the other, the last one begun before it is over."""
    while not over.is_set():
        await world.play(http, f"s{number}", TURNS, tokens, deadline=180)
        number += stride


def versions_served(world: World, engine: int, life: int) -> set[int]:
    return {version for _, _, version, _ in world.engines[engine].lines(life)}


async def freeze_amid_answers(world: World) -> None:
    """Freeze the first engine while it owes the rest of answers that the gateway has the beginning of.

    It is frozen before its log is read: reading holds up this process, gateway included, for long enough that an engine
    left running could have said all it had to say.
    """
    end = time.monotonic() + 120
    while True:
        world.engines[0].signal(signal.SIGSTOP)
        await asyncio.sleep(0.2)
        if world.begun_on(0) >= 5:
            return
        assert time.monotonic() < end, "waited 120 s for answers that have begun"
        world.engines[0].signal(signal.SIGCONT)
        await asyncio.sleep(0.2)


async def wait_for(condition: object, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.2)  # some conditions read all that the engines have written


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.parametrize("on_update", repetitions(["refill"], ["keep", "refill"]))
async def test_updates_and_a_kill_under_streaming_sessions(tmp_path: Path, warm: Warm, on_update: str) -> None:
    async with world(tmp_path, warm, every=EVERY, on_update=on_update) as there:
        there.publisher.start()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as http:
            over = asyncio.Event()
            agents = asyncio.gather(*(keep_playing(there, http, number, SESSIONS, over) for number in range(SESSIONS)))
            await wait_for(lambda: len(versions_served(there, 0, 1)) >= VERSIONS, 120, "versions of the first engine")
            await freeze_amid_answers(there)
            there.engines[0].kill()
            await asyncio.sleep(1.0)
            there.engines[0].start()
            await wait_for(lambda: versions_served(there, 0, 2), 120, "the engine that was started again")
            over.set()
            await agents
        there.publisher.stop()
        assert there.publisher.failure is None
        check_records(there, TURNS)
        assert len(versions_served(there, 1, 1)) >= VERSIONS
        assert there.pool.seams["engine_lost"] >= 1, there.pool.seams
        assert there.pool.seams["weights"] >= SESSIONS, there.pool.seams


@pytest.mark.chaos
async def test_a_frozen_engine_is_left_and_used_again_when_it_wakes(tmp_path: Path, warm: Warm) -> None:
    async with world(tmp_path, warm, every=0.5) as there, aiohttp.ClientSession() as http:
        there.publisher.start()
        over = asyncio.Event()
        agents = asyncio.gather(*(keep_playing(there, http, n, 40, over, tokens=200) for n in range(40)))
        await freeze_amid_answers(there)
        frozen = time.monotonic()
        over.set()
        await agents
        await asyncio.sleep(max(0.0, 20.0 - (time.monotonic() - frozen)))
        assert not there.node.fleet.members.get("engine-0") or not there.node.fleet.members["engine-0"].up
        there.engines[0].signal(signal.SIGCONT)
        await wait_for(lambda: len(there.node.fleet.ready(POLICY)) == 2, 120, "the engine to be back")
        check_records(there, TURNS)
        assert there.pool.seams["engine_lost"] >= 1, there.pool.seams
