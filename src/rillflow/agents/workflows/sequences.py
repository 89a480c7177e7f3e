"""Calls that are each a sequence of their own, with a reward of its own: what the multi-policy workflows are made of.

Invariant: the n-th answer that a policy gives through a `Sequences` is leaf n of its tree, so that `reward` reaches
the sample of exactly that answer. For this every call begins a conversation of its own, and calls are made one after
the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rillflow.errors import WorkflowError
from rillflow.types import Said

if TYPE_CHECKING:
    from rillflow.contracts import Episode


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer; `leaf` is its place among those of its policy."""

    said: Said
    policy: str
    leaf: int

    @property
    def text(self) -> str:
        return self.said.text


class Sequences:
    """The calls of one episode. `settings` are those of the OpenAI client, by role."""

    def __init__(self, episode: Episode, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._episode = episode
        self._settings = settings
        self._leaves: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    async def ask(self, role: str, text: str, **settings: Any) -> Spoken:
        """One answer of `role` to `text`; `settings` of this call go before the role's."""
        (spoken,) = await self.ask_many(role, text, 1, **settings)
        return spoken

    async def ask_many(self, role: str, text: str, count: int, **settings: Any) -> list[Spoken]:
        """Several independent answers of `role` to the same `text`."""
        player = self._episode.role(role)
        async with self._turn:
            messages = [{"role": "user", "content": text}]
            said = await player.ask_many(messages, count, **{**self._settings.get(role, {}), **settings})
            first = self._leaves[player.policy]
            self._leaves[player.policy] += len(said)
        return [Spoken(one, player.policy, first + place) for place, one in enumerate(said)]

    def reward(self, spoken: Spoken, value: float) -> None:
        """What this answer is worth; the last word counts."""
        self._episode.reward(value, leaf=spoken.leaf, policy=spoken.policy)

    def outcome(self, value: float, **others: float) -> dict[str, float]:
        """What a workflow returns: the trajectory's reward is the solver's, `others` are by role.

        Where one policy plays several roles, the trajectory's reward is that policy's.
        """
        solver = self._episode.role("solver").policy
        if solver != self._episode.policies[0]:
            raise WorkflowError(
                f"the run's first policy is {self._episode.policies[0]}, but {solver} plays the solver",
                "name the solver's policy first in `policies`: its reward is what the run reports and evaluates",
            )
        return {self._episode.role(role).policy: worth for role, worth in others.items()} | {solver: value}
