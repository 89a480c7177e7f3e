"""Our gateway as `bench.gateway` measures it: the full thing, in a process of its own.

Real tokenizer and chat template (the tiny policy's), token trees, every answer on disk before its end is sent, the
upstream as a remote engine in an engine pool. A line of JSON asks, a line answers: `open` some sessions, `close` all
and say what the last one left.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.engine.remote import RemoteEngine
from rillflow.gateway import Gateway, Policy, Renderer
from rillflow.gateway.engine_pool import EnginePool, Fleet
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.wire.blocking import collect_seldom, keep_what_is_there

LIMITS = GatewayConfig(sessions=1 << 20, total=1 << 16)


class Ours:
    """Policies `whole` and `parts`: the same upstream, which answers at once or bit by bit."""

    def __init__(self, upstream: str, folder: Path) -> None:
        renderer = Renderer.load("tiny")
        self._fleets = {name: Fleet([RemoteEngine(name, f"{upstream}/{name}", "token")]) for name in ("whole", "parts")}
        pools = {name: EnginePool(name, fleet, context=1 << 16) for name, fleet in self._fleets.items()}
        self._log = FileSessionLog(folder)
        self.gateway = Gateway(
            "token",
            {name: Policy(pool, renderer) for name, pool in pools.items()},
            {name: SamplingConfig() for name in pools},
            limits=LIMITS,
            log=self._log,
        )
        self.gateway.sessions.restore()
        self._opened: list[str] = []
        self._number = 0

    async def open(self, count: int) -> list[str]:
        keys = []
        for _ in range(count):
            self._number += 1
            name = f"session-{self._number}"
            keys.append(self.gateway.sessions.open(name, seed=self._number, group=name, deadline_seconds=3600.0))
            self._opened.append(name)
        await self._log.synced()
        return keys

    def close(self) -> list[int]:
        """Close all sessions; return how many tokens train in each sample of the last one."""
        trained: list[int] = []
        for name in self._opened:
            record = self.gateway.sessions.close(name)
            rows = [row for policy in record.trees for row in record.samples(policy)]
            trained = [row.trained for row in rows] or trained
        self._opened = []
        return trained

    async def stop(self) -> None:
        await self.gateway.stop()
        for fleet in self._fleets.values():
            await fleet.close()
        await self._log.close()


async def main(upstream: str, folder: Path) -> None:
    ours = Ours(upstream, folder)
    url = await ours.gateway.start()
    keep_what_is_there()  # as a node does
    collect_seldom()
    _say({"port": int(url.rpartition(":")[2])})
    while line := await asyncio.to_thread(sys.stdin.readline):
        ask = json.loads(line)
        _say({"keys": await ours.open(ask["open"])} if "open" in ask else {"trained": ours.close()})
    await ours.stop()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
