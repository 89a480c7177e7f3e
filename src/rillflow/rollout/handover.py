"""A node in the process of its trainer: it samples when it is told to, with weights that are handed over in memory.

Invariants: no token is sampled and no task is leased before the first `begin`, nor between an `end` and the next
`begin`; what is sampled in between is of the version that was handed over. Episodes that are cut by an `end` stay open
and go on, with a seam, under the weights of the next `begin`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rillflow.errors import WeightsError
from rillflow.gateway.sampling.node_engines import NodeEngines
from rillflow.rollout.episodes import Episodes

if TYPE_CHECKING:
    import torch

    from rillflow.contracts import Tensors

_TRAINING = "training"


class HandedWeights:
    """`contracts.WeightStore` of one version, which lies in memory until the engine has it."""

    def __init__(self) -> None:
        self._head: int | None = None
        self._tensors: Tensors = {}

    def publish(self, tensors: Tensors, version: int, parent: int | None) -> None:
        self._head, self._tensors = version, tensors

    def head(self) -> int | None:
        return self._head

    def versions(self) -> list[int]:
        return [] if self._head is None else [self._head]

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        if version != self._head or not self._tensors:
            raise WeightsError(f"version {version} is not here", "the trainer hands over its newest weights alone")
        return dict(self._tensors)

    def rewind(self, version: int) -> list[int]:
        """Nothing is kept that could come back."""
        return []

    def taken(self) -> None:
        """The engine has its copy: the trainer may change these tensors."""
        self._tensors = {}


class Handover:
    """The trainer's hand on the node of its process; everything here runs in the node's event loop."""

    def __init__(self, policy: str) -> None:
        self.weights = HandedWeights()
        self._policy = policy
        self._engines: NodeEngines | None = None
        self._episodes: Episodes | None = None

    async def attach(self, engines: NodeEngines, episodes: Episodes) -> None:
        """The node is about to run; it rests until it is told to begin."""
        self._engines, self._episodes = engines, episodes
        await self.end()

    def detach(self) -> None:
        """The node has ended: there is nothing left to begin or to end."""
        self._engines = self._episodes = None

    async def begin(self, tensors: Tensors, version: int) -> None:
        """Sample with these weights. WeightsError when they do not fit the engine."""
        engines, episodes = self._engines, self._episodes
        if engines is None or episodes is None:
            return
        self.weights.publish(tensors, version, None)
        await engines.refresh(self._policy)
        self.weights.taken()
        if self._engines is None:
            return  # it has ended meanwhile
        serving = (engines.versions() or {}).get(self._policy)
        if serving != version:
            raise WeightsError(
                f"the engine serves version {serving}, not version {version} which was handed over",
                "the log says why the weights were refused; dtype, model and shapes must be the trainer's",
            )
        for member in engines.fleet.members.values():
            await member.engine.release(_TRAINING)
        engines.fleet.tell()
        episodes.resting = False
        episodes.on_room()

    async def end(self) -> None:
        """Returns once no token is being sampled."""
        if self._engines is None or self._episodes is None:
            return
        self._episodes.resting = True
        for member in self._engines.fleet.members.values():
            await member.engine.hold(_TRAINING, seconds=math.inf)
