"""The base of our own environments, and what the generators of prompts share.

Invariants: the same payload and seed give the same world. An invalid action costs a step, is reported
(`info["invalid"]`) and changes nothing else. An episode ends by its own rules or after `steps` actions, and nothing
happens after its end.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rillflow.errors import EnvironmentLost
from rillflow.types import Observation

_LONGEST = 2000  # characters of an action that are read


class Turn(NamedTuple):
    """The result of one action."""

    text: str
    reward: float = 0.0
    done: bool = False
    invalid: bool = False


class World(ABC):
    """An environment in this process, whose steps take almost no time."""

    def __init__(self, *, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self.steps = steps
        self._taken = 0
        self._earned = 0.0
        self._state = "new"

    @abstractmethod
    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        """Make the world and return the first text."""

    @abstractmethod
    def act(self, action: str) -> Turn:
        """Take an action."""

    @abstractmethod
    def actions(self) -> list[str] | None:
        """Return the possible actions, sorted, or None if there are too many to list."""

    def info(self) -> dict[str, Any]:
        """Return what workflows may need beyond the text."""
        return {}

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        text = self.begin(payload, seed)
        self._taken, self._earned, self._state = 0, 0.0, "open"
        return Observation(text, actions=self.actions(), info=self.info())

    async def step(self, action: str) -> Observation:
        if self._state == "new":
            raise EnvironmentLost("the environment was not reset", "call reset before the first step")
        if self._state == "over":
            return Observation("It is over.", done=True, actions=[], info={"invalid": True})
        turn = self.act(" ".join(action[:_LONGEST].split()))
        self._taken += 1
        self._earned += turn.reward
        late = not turn.done and self._taken >= self.steps
        if late or turn.done:
            self._state = "over"
        text = f"{turn.text} No steps are left." if late else turn.text
        info = {"invalid": turn.invalid, **self.info()}
        if self._state == "over":
            info |= {"won": self._earned >= 1.0, "steps": self._taken}
            return Observation(text, turn.reward, True, [], info)
        return Observation(text, turn.reward, False, self.actions(), info)

    async def close(self) -> None:
        self._state = "new"


def rows(name: str, payloads: Iterator[dict[str, Any]], split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of these payloads, with the ids that all generators use."""
    for index, payload in zip(range(count), payloads, strict=False):
        yield {"id": f"{name}-{split}-{seed}-{index}", "payload": payload}


def world_random(name: str, payload: Mapping[str, Any], seed: int) -> random.Random:
    """Return the random generator of the payload's `world`, or of the episode's seed if it has none."""
    return random.Random(f"{name}/{payload.get('world', seed)}")
