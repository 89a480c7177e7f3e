"""Turns to change weights: at most half of a policy's engines at once, and nothing waits for an engine that died."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dataflow_server import served

from dataflow_world import POLICY
from rillflow.errors import BadRequest
from rillflow.types import AskTurn, EngineInfo, Heartbeat
from rillflow.weights.updates import SILENT_SECONDS, TURN_SECONDS, Turns


class HandClock:
    time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


@pytest.mark.parametrize(("engines", "most"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (9, 5)])
def test_at_most_half_of_the_engines_have_a_turn(engines: int, most: int) -> None:
    turns = Turns(HandClock())
    granted = [turns.ask("p", f"e{n}", engines) for n in range(engines + 1)]
    assert granted == [True] * most + [False] * (engines + 1 - most)
    assert turns.ask("q", "e0", engines)  # policies do not wait for each other


def test_a_turn_goes_on_when_it_is_given_back() -> None:
    turns = Turns(HandClock())
    assert turns.ask("p", "a", 2)
    assert not turns.ask("p", "b", 2)
    turns.done("p", "b")  # an engine without a turn gives none back
    assert not turns.ask("p", "b", 2)
    turns.done("p", "a")
    assert turns.ask("p", "b", 2)


def test_the_turn_of_who_died_ends_and_that_of_who_asks_again_does_not() -> None:
    clock = HandClock()
    turns = Turns(clock)
    assert turns.ask("p", "a", 2)
    clock.time += TURN_SECONDS - 1
    assert turns.ask("p", "a", 2)
    clock.time += TURN_SECONDS - 1
    assert not turns.ask("p", "b", 2)
    clock.time += 2
    assert turns.ask("p", "b", 2)


def beat(node: str, version: int) -> Heartbeat:
    return Heartbeat(node=node, incarnation="i", attempts=[], versions={POLICY: version}, capacity=1)


def engine(name: str, version: int) -> EngineInfo:
    return EngineInfo(name=name, url="http://127.0.0.1:9", versions={POLICY: version}, context=64, slots=4)


async def test_turns_over_http(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        ask = run.client.turn
        for n in range(4):
            await run.client.heartbeat(beat(f"n{n}", 0))
        assert [(await ask(AskTurn(policy=POLICY, engine=f"n{n}"))).granted for n in range(4)] == [
            True,
            True,
            False,
            False,
        ]
        assert not (await ask(AskTurn(policy=POLICY, engine="n0", done=True))).granted
        assert (await ask(AskTurn(policy=POLICY, engine="n2"))).granted
        for bad in (
            AskTurn(policy="nobody", engine="n0"),
            AskTurn(policy=POLICY, engine=""),
            AskTurn(policy=POLICY, engine="x" * 201),
        ):
            with pytest.raises(BadRequest):
                await ask(bad)


async def test_who_waits_gets_a_turn_as_soon_as_it_is_free(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        for n in range(2):
            await run.client.heartbeat(beat(f"n{n}", 0))
        assert (await run.client.turn(AskTurn(policy=POLICY, engine="n0"))).granted
        waiting = asyncio.create_task(run.client.turn(AskTurn(policy=POLICY, engine="n1", wait=30.0)))
        async with asyncio.timeout(20):
            waits: list[str] = []
            while not any("n1 waits to update the weights" in why for why in waits):
                waits = (await run.client.status()).waits
            await run.client.turn(AskTurn(policy=POLICY, engine="n0", done=True))
            assert (await waiting).granted


async def test_where_there_are_engine_processes_they_are_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        for n in range(8):  # nodes that sample on the engine processes
            await run.client.heartbeat(beat(f"n{n}", 0))
        for name in ("a", "b"):
            await run.client.engine_beat(engine(name, 0))
        asked = [(await run.client.turn(AskTurn(policy=POLICY, engine=name))).granted for name in ("a", "b")]
        assert asked == [True, False]


async def test_the_versions_in_use_are_those_of_live_nodes_and_engines(tmp_path: Path) -> None:
    clock: Any = HandClock()
    async with served(tmp_path, clock=clock) as run:
        assert await run.client.versions_in_use(POLICY) == []
        await run.client.heartbeat(beat("n0", 3))
        await run.client.heartbeat(beat("n1", 1))
        await run.client.heartbeat(beat("n2", 3))
        await run.client.engine_beat(engine("e", 2))
        assert await run.client.versions_in_use(POLICY) == [1, 2, 3]
        assert await run.client.versions_in_use("nobody") == []
        clock.time += SILENT_SECONDS + 0.1
        assert await run.client.versions_in_use(POLICY) == [1, 3]
        await run.client.heartbeat(beat("n1", 4))
        assert await run.client.versions_in_use(POLICY) == [3, 4]
        run.ledger.db.run("UPDATE nodes SET state = 'gone' WHERE name IN ('n0', 'n2')")
        assert await run.client.versions_in_use(POLICY) == [4]
