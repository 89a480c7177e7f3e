"""An environment whose game is played in a process of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rillflow.agents.environments.pool import Seat, shared_pool
from rillflow.errors import EnvironmentLost
from rillflow.types import Observation

WAIT_SECONDS = 600.0  # for a game to get free


class Pooled:
    """`kind` is the module:function that the process calls for its games; `options` reach each game's reset."""

    def __init__(self, kind: str, *, workers: int, games: int, timeout: float, options: Mapping[str, Any]) -> None:
        if workers < 1 or games < 1 or timeout <= 0:
            raise ValueError("workers and games must be at least 1, timeout more than 0")
        self._kind, self._workers, self._games = kind, workers, games
        self._timeout = timeout
        self._options = dict(options)
        self._seat: Seat | None = None
        self._left: list[str] = []

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        if self._seat is None or self._seat.worker.dead:
            await self.close()
            self._seat = await shared_pool(self._kind, self._workers, self._games).take(WAIT_SECONDS)
        said = await self._seat.call("reset", self._timeout, payload=dict(payload), seed=seed, options=self._options)
        self._left = said.pop("plan", [])
        return _observation(said)

    async def step(self, action: str) -> Observation:
        if self._seat is None:
            raise EnvironmentLost("the environment was not reset", "call reset before the first step")
        said = await self._seat.call("step", self._timeout, action=action)
        # A gold path is one from the beginning: it is worth nothing behind another step.
        self._left = self._left[1:] if self._left and action == self._left[0] else []
        return _observation(said)

    async def plan(self) -> list[str]:
        """What is left of the gold path, as long as it was followed."""
        return list(self._left)

    async def close(self) -> None:
        if self._seat is not None:
            self._seat.give_back()
            self._seat = None


def _observation(said: Any) -> Observation:
    try:
        return msgspec.convert(said, Observation)
    except msgspec.ValidationError as error:
        raise EnvironmentLost(f"the environment's process answered something else: {error}", "report it") from error
