"""A cluster inside the test: its nodes are names, its actors real hosts of real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rillflow.resources.ray_cluster import RoleHost, SeatLost, Wants


class ScriptHost(RoleHost):
    """Its processes are small scripts instead of roles."""

    program = (sys.executable, "-c")


class FakeSeat:
    def __init__(self, cluster: FakeCluster, name: str, node: str) -> None:
        self.host = ScriptHost(name, "test-run")
        self.cluster = cluster
        self.node = node
        self.address = "127.0.0.1"
        self.pid = 0
        self.gone = False

    async def call(self, method: str, *arguments: str | float) -> Any:
        await asyncio.sleep(0)
        if self.gone or self.node not in self.cluster.nodes:
            raise SeatLost("gone", (self.node,))
        assert all(isinstance(each, str | int | float) for each in arguments)
        return getattr(self.host, method)(*arguments)

    def tell(self, method: str, *arguments: str | float) -> None:
        getattr(self.host, method)(*arguments)

    def die(self) -> None:
        """As an actor does: its process goes with it."""
        self.gone = True
        self.host.signal(signal.SIGKILL)
        while self.host.running():
            time.sleep(0.005)


class FakeCluster:
    """A node has room for `room` processes."""

    def __init__(self, *nodes: str, room: int = 2) -> None:
        self.nodes = list(nodes)
        self.room = room
        self.seats: list[FakeSeat] = []
        self.waited: list[float] = []

    async def place(self, names: Sequence[str], wants: Sequence[Wants], still: Callable[[float], bool]) -> list[Any]:
        waited = 0.0
        while True:
            free = [node for node in self.nodes for _ in range(self.room - sum(s.node == node for s in self.seats))]
            if len(free) >= len(names):
                seats = [FakeSeat(self, name, node) for name, node in zip(names, free, strict=False)]
                self.seats += seats
                return seats
            self.waited.append(waited)
            if not still(waited):
                return []
            waited += 1.0
            await asyncio.sleep(0.01)

    async def leave(self, seats: Sequence[FakeSeat]) -> None:
        for seat in seats:
            seat.die()
            self.seats.remove(seat)

    async def is_alive(self, node: str) -> bool:
        return node in self.nodes

    async def offers(self) -> str:
        return f"{len(self.nodes)} nodes"

    def lose(self, node: str) -> None:
        self.nodes.remove(node)
        for seat in self.seats:
            if seat.node == node:
                seat.die()
