"""A node outlives the errors of the dataflow service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rillflow.errors import RillflowError, Unauthorized
from rillflow.rollout import node as module
from rillflow.rollout.node import Node
from rillflow.types import HeartbeatReply, TaskLeases


class Rollout:
    episodes = 2
    refresh_every = 1.0


class Recipe:
    rollout = Rollout()


class Dataflow:
    """Fails with the given errors first, then says that the run has ended once a heartbeat was taken."""

    def __init__(self, lease: list[Exception], beat: list[Exception]) -> None:
        self.lease, self.beat = lease, beat
        self.heard = asyncio.Event()

    async def lease_tasks(self, ask: Any) -> TaskLeases:
        if self.lease:
            raise self.lease.pop(0)
        await self.heard.wait()
        return TaskLeases(leases=[], heads={}, phase="ended")

    async def heartbeat(self, beat: Any, deadline: float) -> HeartbeatReply:
        if self.beat:
            raise self.beat.pop(0)
        self.heard.set()
        return HeartbeatReply(lost=[], heads={}, phase="training")


def make(dataflow: Any) -> Node:
    nothing: Any = None
    recipe: Any = Recipe()
    return Node(
        "n", recipe, dataflow=dataflow, writer=nothing, gateway=nothing, gateway_url="", engines={}, refreshers={},
        workflow=nothing, reward=None, client=nothing,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_WAIT", 0.01)
    monkeypatch.setattr(module, "HEARTBEAT_EVERY", 0.01)


async def test_a_failing_service_is_asked_again() -> None:
    dataflow = Dataflow([RillflowError("disk I/O error")], [RillflowError("disk I/O error")])
    await asyncio.wait_for(make(dataflow).run(), 5)
    assert not dataflow.lease
    assert not dataflow.beat


async def test_a_wrong_token_ends_the_node() -> None:
    with pytest.raises(Unauthorized):
        await asyncio.wait_for(make(Dataflow([Unauthorized("wrong token")], [])).run(), 5)
