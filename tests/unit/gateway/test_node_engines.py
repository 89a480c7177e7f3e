"""A node's engines: its own, which follow the weight store, or processes that the roster names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from counting_engine import CountingEngine, request, until
from rillflow.config.load import validate
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import EngineService
from rillflow.errors import Unavailable
from rillflow.gateway import node_engines as module
from rillflow.gateway.node_engines import NodeEngines, node_engines
from rillflow.types import AskTurn, Engines, LookEngines, TurnReply
from rillflow.weights.models import load_policy_model
from rillflow.weights.store import FolderStore

TOKEN = "t" * 32


def recipe(folder: Path, **rollout: Any) -> Any:
    (folder / "prompts.jsonl").write_text('{"id": "0"}\n')
    return validate(
        {
            "name": "n",
            "policies": {"p": {"model": "tiny"}},
            "workflow": "rillflow.examples.stockroom:play",
            "data": {"prompts": {"path": str(folder / "prompts.jsonl")}},
            "rollout": {"refresh_every": 0.01, **rollout},
        }
    )


async def texts(engines: NodeEngines, **asked: Any) -> list[int]:
    return [token async for chunk in engines.pools["p"].generate(request(**asked)) for token in chunk.tokens]


async def test_own_engines_follow_the_weight_store(tmp_path: Path) -> None:
    model = load_policy_model("tiny", "fp32", torch.device("cpu"))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    store = FolderStore(tmp_path / "weights" / "p")
    store.publish(tensors, 3, None)
    engines = node_engines(recipe(tmp_path), name="node", token=TOKEN, weights=tmp_path / "weights")
    await engines.start()
    assert engines.versions() == {"p": 3}
    assert engines.behind({"p": 4}) == ["p"]
    assert engines.behind({"p": 3}) == engines.behind({}) == []
    assert len(await texts(engines)) == 20
    store.publish(tensors, 4, 3)
    await engines.refresh("p")
    assert engines.versions() == {"p": 4}
    running = asyncio.create_task(engines.run())
    store.publish(tensors, 5, 4)
    await until(lambda: engines.versions() == {"p": 5})
    assert engines.stats()["p.loads"] == 3
    assert engines.waiting() == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engines.close()


@pytest.mark.parametrize("staggered", [True, False])
async def test_own_engines_are_patched_in_turn_if_asked_to_and_tell_what_it_took(
    tmp_path: Path, *, staggered: bool
) -> None:
    model = load_policy_model("tiny", "fp32", torch.device("cpu"))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    store = FolderStore(tmp_path / "weights" / "p", deltas=True)
    store.publish(tensors, 0, None)
    asked: list[AskTurn] = []

    async def turn(ask: AskTurn, deadline: float) -> TurnReply:
        asked.append(ask)
        return TurnReply(granted=True)

    played = recipe(tmp_path)
    rollout = played.rollout.model_copy(update={"staggered": staggered})
    played = played.model_copy(update={"rollout": rollout})
    engines = node_engines(played, name="node", token=TOKEN, weights=tmp_path / "weights", turn=turn)
    await engines.start()
    assert asked == []
    for version in (1, 2):
        next(iter(tensors.values())).view(-1)[version] += 1.0
        store.publish(tensors, version, version - 1)
        await engines.refresh("p")
    assert engines.versions() == {"p": 2}
    stats, entries = engines.stats(), store.line().entries
    assert (stats["p.loads"], stats["p.delta_loads"]) == (2, 2)  # version 0 it had from its model
    assert stats["p.pull_bytes"] == entries[1].delta_bytes + entries[2].delta_bytes
    assert 0 < stats["p.pause_seconds"] <= stats["p.load_seconds"]
    assert stats["p.pull_seconds"] > 0
    turns = [("p", "node", False), ("p", "node", True)] * 2
    assert [(ask.policy, ask.engine, ask.done) for ask in asked] == (turns if staggered else [])
    await engines.close()


class Roster:
    """Returns the given engines."""

    def __init__(self) -> None:
        self.hosts: list[EngineHost] = []
        self.down = False

    async def __call__(self, ask: LookEngines) -> Engines:
        if self.down:
            raise Unavailable("the dataflow service is down")
        return Engines(engines=[host.known for host in self.hosts])


async def test_engine_processes_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOW_EVERY", 0.02)
    roster = Roster()
    engines = node_engines(
        recipe(tmp_path, engines=2), name="node", token=TOKEN, weights=tmp_path / "weights", roster=roster
    )
    await engines.start()
    assert engines.versions() is None, "without an engine no task is asked for"
    running = asyncio.create_task(engines.run())
    call = asyncio.create_task(texts(engines))
    await until(lambda: bool(engines.waiting()))
    services = []
    for number in range(2):
        host = EngineHost(f"e{number}", {"p": CountingEngine(version=4 + number)})
        services.append(EngineService(host, TOKEN))
        await services[-1].start()
        roster.hosts.append(host)
    await until(lambda: engines.versions() == {"p": 4})
    assert len(await asyncio.wait_for(call, 60)) == 20
    assert engines.behind({"p": 9}) == [], "they pull by themselves"
    await until(lambda: engines.stats() == {"engines": 2})
    roster.down = True
    await services[0].stop()
    roster.hosts.pop(0)
    for number in range(8):
        assert len(await texts(engines, group=str(number))) == 20
    roster.down = False
    await until(lambda: set(engines.fleet.members) == {"e1"})
    assert engines.versions() == {"p": 5}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engines.close()
    await services[1].stop()
