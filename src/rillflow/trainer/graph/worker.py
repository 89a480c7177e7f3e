"""What a trainer's loop works with: the models of all roles, and the chain that is run for every batch.

Invariants: a step that is abandoned changes nothing; `masters`, `moments` and `steps` are all there is to go on exactly
from; every rank has the same chain. Tensors of a role besides the first one trained carry its name: `critic/…`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from rillflow.config import PolicyConfig, Recipe, TrainerConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.algorithms import ALGORITHMS, Algorithm
from rillflow.trainer.consistency import Watch
from rillflow.trainer.graph.builtin import Mode, chain_of
from rillflow.trainer.graph.databuffer import Databuffer, Part
from rillflow.trainer.graph.pipeline import Pipeline
from rillflow.trainer.graph.planner import Chain, agree
from rillflow.trainer.graph.roles import Roles
from rillflow.trainer.graph.step import Step
from rillflow.trainer.learner import Learner
from rillflow.trainer.metrics import finite
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.probing import Prober
from rillflow.trainer.staged import staged_columns
from rillflow.types import KeptTokens
from rillflow.weights.models import pick_device

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.trainer.parallel.sharding import Shards
    from rillflow.types import Probe
    from rillflow.weights.adapters import Adapter

# How many updates a role has made, among its moments: with mini-batches and warm-ups it is not the number of batches.
_UPDATES = "updates"


# What the code of a model that we do not fit raises. Errors of other ranks are RuntimeErrors.
_UNFIT = (ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError, AssertionError)


def _nothing() -> None:
    """Nobody asks, nobody hears."""


def build_worker(
    recipe: Recipe,
    policy: str,
    peers: Peers,
    *,
    device: torch.device | None = None,
    mode: Mode | None = None,
    clock: Clock | None = None,
) -> Worker:
    """Everything that trains `policy` on this rank, by default on the device and in the mode that the recipe names.
    Collective."""
    settings = recipe.policies[policy]
    config = settings.trainer
    chain = chain_of(config, mode or recipe.mode, staged=staged_columns(settings.stages))
    roles = Roles(settings, peers, device or pick_device(config.device), recipe.seed, recipe.runtime.deterministic)
    algorithm = ALGORITHMS[config.algorithm](config)
    try:
        learners = roles.learners(chain.roles)
    except _UNFIT as error:  # it would be the same at the next start
        raise ConfigError(
            f"the trainer cannot build {settings.model}: {type(error).__name__}: {error}",
            "train a model of a family that docs/training.md names, or see the traceback in this log",
        ) from error
    return Worker(chain, learners, algorithm, config, peers, seed=recipe.seed, clock=clock)


class Worker:
    """`models` are the roles' by name. The first role that trains, the actor where there is one, is what is published.

    `steps` counts batches. `generates` says whether the chain's source asks this worker's own engine for the samples of
    each step; otherwise it takes what others have sampled. `kept` is what the last step tells of episodes that the run
    may keep, of this rank's rows.
    """

    def __init__(
        self,
        chain: Chain,
        models: Mapping[str, Learner],
        algorithm: Algorithm,
        config: TrainerConfig,
        peers: Peers,
        *,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        agree(chain, peers)
        self.steps = 0
        self.kept: list[KeptTokens] = []
        self.generates = chain.nodes[0].kind == "generate"
        self._chain = chain
        self._models = models
        self._algorithm = algorithm
        self._config = config
        self._peers = peers
        self._seed = seed
        self._clock = clock or SystemClock()
        self._watch = Watch()

    def step(
        self,
        parts: Iterable[Part],
        check: Callable[[], None] = _nothing,
        publish: Callable[[], None] = _nothing,
    ) -> dict[str, float]:
        """Run the chain on one batch, whose parts may still be coming; returns the metrics of the whole.

        What `check` or `parts` raises before the first update abandons the step: weights and optimizers are as before.
        `publish` is called by the chain's last node, with the new weights in place.
        """

        def rows() -> Iterator[Databuffer]:
            return (part if isinstance(part, Databuffer) else Databuffer(part) for part in parts)

        step = Step(
            number=self.steps,
            config=self._config,
            algorithm=self._algorithm,
            models=self._models,
            peers=self._peers,
            fetch=self._not_this if self.generates else rows,
            generate=rows if self.generates else self._not_this,
            publish=publish,
            check=check,
            seed=self._seed,
        )
        metrics = Pipeline(self._chain, step, self._clock).run()
        self.steps += 1
        self.kept = step.told.values()
        if self._peers.rank == 0:
            self._watch.see(metrics, truncated=self._config.truncate is not None)
        return finite(metrics)

    def _not_this(self) -> Iterator[Databuffer]:
        source = self._chain.nodes[0]
        raise GraphError(
            f"node {source.id} is of kind {source.kind} and asks the step for the other kind of source",
            f"let its function call step.{source.kind}(), or declare the other kind",
        )

    # ------------------------------------------------------------ weights and state

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """As engines load them, tied ones under each of their names; good until the next step. Collective."""
        return self._main.weights(dtype)

    def shards(self, dtype: torch.dtype) -> Shards:
        """What this rank has of them. Collective."""
        return self._main.shards(dtype)

    def adapter(self) -> Adapter | None:
        """What was trained of a LoRA policy; None of any other."""
        return self._main.adapter()

    def prober(self, settings: PolicyConfig) -> Callable[[], Probe | None]:
        """What makes the probe of each published version; a model that gives no log-probs has none."""
        if not settings.proves or "actor" not in self._models:
            return _nothing
        return Prober(self._models["actor"], settings)

    def masters(self) -> dict[str, torch.Tensor]:
        """The exact weights of all that trains, each tied one once."""
        return {
            prefix + name: tensor
            for prefix, optimizer in self._trained()
            for name, tensor in optimizer.masters().items()
        }

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizers' states, by `moment/parameter`."""
        return {
            prefix + name: tensor
            for prefix, optimizer in self._trained()
            for name, tensor in (*optimizer.moments().items(), (_UPDATES, torch.tensor(optimizer.steps)))
        }

    def restore(self, masters: Tensors, moments: Tensors, steps: int) -> None:
        """Continue exactly from what `masters`, `moments` and `steps` were."""
        prefixes = [prefix for prefix, _ in self._trained() if prefix]
        for prefix, optimizer in self._trained():
            state = _under(moments, prefix, prefixes)
            made = int(state.pop(_UPDATES, torch.tensor(steps)))
            optimizer.restore(_under(masters, prefix, prefixes), state, made)
        self.steps = steps

    def optimizers(self) -> list[Optimizer]:
        """Of all roles that train."""
        return [optimizer for _, optimizer in self._trained()]

    @property
    def _main(self) -> Optimizer:
        return self._trained()[0][1]

    def _trained(self) -> list[tuple[str, Optimizer]]:
        """The optimizers, each with the prefix of its tensors' names."""
        roles = sorted(self._models, key=lambda role: (role != "actor", role))
        found = [(role, optimizer) for role in roles if (optimizer := self._models[role].optimizer) is not None]
        return [(f"{role}/" if place else "", optimizer) for place, (role, optimizer) in enumerate(found)]


def _under(tensors: Tensors, prefix: str, prefixes: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of one role, by their own names."""
    others = tuple(other for other in prefixes if other != prefix)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.startswith(others)
    }
