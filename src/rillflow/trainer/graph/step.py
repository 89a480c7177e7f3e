"""What the functions of a step's nodes are given besides data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.kept import Told
from rillflow.trainer.parallel.peers import Peers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Model(Protocol):
    """A role's model. It scores the trained tokens of rows: log-probs (actor, reference) or values (critic, reward)."""

    def infer(self, data: Databuffer, check: Callable[[], None]) -> npt.NDArray[np.float32]:
        """A column over tokens, without gradient: the score of every trained token, 0 elsewhere."""


@dataclass
class Step:
    """One step on one batch. `number` counts the steps before it. `check` is called often: it raises when the step is
    not worth its time any more. `metrics` are added to by any node, `told` by the one that trains the actor."""

    number: int
    config: TrainerConfig
    algorithm: Algorithm
    models: Mapping[str, Model]
    peers: Peers
    fetch: Callable[[], Iterator[Databuffer]]
    generate: Callable[[], Iterator[Databuffer]]
    publish: Callable[[], None]
    check: Callable[[], None]
    metrics: dict[str, float] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    seed: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The seed of what is drawn in this step."""
        return self.seed, self.number


Parts = Iterable[Databuffer]
