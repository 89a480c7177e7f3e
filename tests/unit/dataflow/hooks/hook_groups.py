"""Groups as hooks see them, made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from statistics import pstdev
from typing import Any

from rillflow.types import Prompt


def prompt(name: str, source: str = "", **payload: Any) -> Prompt:
    return Prompt(id=name, source=source, payload=payload)


@dataclass
class Played:
    """A complete group."""

    prompt: Prompt
    rewards: list[float]
    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    staleness: int = 0
    id: str = "g"
    policy: str = "agent"

    @property
    def flat(self) -> bool:
        return len(self.rewards) > 1 and min(self.rewards) == max(self.rewards)

    @property
    def deviation(self) -> float:
        return pstdev(self.rewards) if len(self.rewards) > 1 else inf


def played(name: str, *rewards: float, **more: Any) -> Played:
    return Played(prompt(name), list(rewards), **more)


@dataclass
class Waiting:
    """A ready group."""

    id: str
    order: int = 0
    oldest: int = 0
    staleness: int = 0
    tokens: int = 1
    spread: float = 1.0
    served: int = 0
