"""What the rewards that come with Rillflow have in common."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rillflow.config.base import Section
from rillflow.errors import ConfigError


class ShippedReward(Section):
    """A reward whose fields are its options, checked before a run starts.

    Calling it gives a finite number, or raises RewardError where none could be computed: never 0 in its place. What is
    no good in an answer is the policy's doing and earns little or nothing; it never raises.
    """

    async def prepare(self) -> None:
        """Make ready what takes longer than a reward may; called once, before the first."""

    @abstractmethod
    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """The reward of an answer to the prompt with this payload."""


def need(package: str, extra: str) -> None:
    """ConfigError where an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed", f"pip install 'rillflow[{extra}]'")
