"""One step, and the worker that runs it for every batch: the models of all roles and the chain of nodes.

`Pipeline` runs the nodes of a chain as a pipeline of generators, pulled by the train nodes. `Worker` keeps the models
between steps and gives out their weights and states.

Invariants: one node is active at a time; parts flow as they arrive, and only a node that needs the whole batch waits
for all of it; an error of `check` or of the source before the first train node has returned leaves every weight as it
was, and after that the step is always finished: a batch that was lost meanwhile fails when it is committed; `masters`,
`moments` and `steps` are all that an exact continuation needs; every rank has the same chain. Names of tensors of a
role other than the first trained one begin with the role: `critic/…`.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import GraphError
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.batches import Databuffer, Part, joined, no_rows
from rillflow.trainer.graph.nodes import Node, with_made
from rillflow.trainer.graph.planner import Chain, agree
from rillflow.trainer.learner import Learner
from rillflow.trainer.metrics import KeptValues, Watch, finite
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.context import in_teams
from rillflow.trainer.parallel.redistribute import Redistribution
from rillflow.types import KeptTokens, Probe
from rillflow.weights.probe import prompts, tolerance_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.contracts import Tensors
    from rillflow.trainer.parallel.sharding import Shards
    from rillflow.weights.codec import Adapter

log = logging.getLogger(__name__)

# The number of a role's updates, stored among its moments: mini-batches and warm-ups make it differ from the batches.
_UPDATES = "updates"


# ---------------------------------------------------------------- what functions of nodes are given


class Model(Protocol):
    """A role's model. It scores the trained tokens of rows: log-probs (actor, reference) or values (critic, reward)."""

    def infer(self, data: Databuffer, check: Callable[[], None]) -> npt.NDArray[np.float32]:
        """Return a column over tokens, without gradient: the score of every trained token, 0 elsewhere."""


@dataclass
class Step:
    """One step on one batch, as the functions of its nodes see it.

    `number` counts the steps before it. Functions call `check` often: it raises if the step should be abandoned. Any
    node may add to `metrics`; the node that trains the actor fills `kept`.
    """

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
    kept: KeptValues = field(default_factory=KeptValues)
    seed: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Return the seed of everything that is drawn in this step."""
        return self.seed, self.number


Parts = Iterable[Databuffer]


# ---------------------------------------------------------------- the pipeline of a step


class Times:
    """Seconds that each node was active. While a node waits for an earlier one, the earlier one is active."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._active: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, node: Node) -> Iterator[None]:
        """Measure a node. An error that leaves it gets a note with the node's id."""
        self._charge()
        self._active.append(node.id)
        try:
            yield
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"in node {node.id} of the step graph")
            raise
        finally:
            self._charge()
            self._active.pop()

    def _charge(self) -> None:
        now = self._clock.monotonic()
        if self._active:
            self._seconds[self._active[-1]] += now - self._since
        self._since = now

    def metrics(self) -> dict[str, float]:
        return {f"node_{re.sub(r'[^A-Za-z0-9]', '_', name)}_seconds": value for name, value in self._seconds.items()}


class Pipeline:
    """Runs a chain once, for one step."""

    def __init__(self, chain: Chain, step: Step, clock: Clock) -> None:
        self._nodes = chain.nodes
        self._step = step
        self._times = Times(clock)

    def run(self) -> dict[str, float]:
        """Run all nodes and return their metrics."""
        stream: Iterable[Databuffer] = ()
        held = everybody = self._step.peers.size
        for node, after in zip(self._nodes, (*self._nodes[1:], None), strict=True):
            wanted = node.ranks or everybody
            if node.is_source:
                stream = self._sourced(node)
            elif node.kind == "publish":
                self._call(node)
            else:
                if wanted != held:
                    stream, held = self._moved(stream, held, wanted), wanted
                if node.on_columns:
                    stream = self._made(node, stream)
                else:
                    again = after is not None and after.kind != "publish"
                    stream = _Replayable(stream) if again else stream
                    self._train(node, stream)
        return self._step.metrics | self._times.metrics()

    def _call(self, node: Node, *given: object) -> Any:
        with self._times.of(node):
            return node.function.run(self._step, *given, **node.options)

    def _sourced(self, node: Node) -> Iterator[Databuffer]:
        parts = iter(self._call(node))
        empty = True
        while True:
            with self._times.of(node):
                part = next(parts, None)
            if part is None:
                break
            empty = False
            yield part
        if empty:
            raise GraphError(f"node {node.id} gave no data", "a source yields at least one part of the batch")

    def _made(self, node: Node, stream: Iterable[Databuffer]) -> Iterator[Databuffer]:
        if node.function.scope == "batch":
            stream = self._whole(node, stream)
        for data in stream:
            columns = self._call(node, data)
            with self._times.of(node):
                more = with_made(node, data, columns)
            yield more

    def _whole(self, node: Node, stream: Iterable[Databuffer]) -> Iterator[Databuffer]:
        with self._times.of(node):
            whole = joined(list(stream))
        yield whole

    def _moved(self, stream: Iterable[Databuffer], held: int, wanted: int) -> Iterator[Databuffer]:
        """Move the whole batch from `held` ranks to `wanted` ranks. Collective."""
        yield Redistribution(self._step.peers).move(joined(list(stream)), held, wanted)

    def _train(self, node: Node, stream: Iterable[Databuffer]) -> None:
        self._step.metrics |= self._call(node, iter(stream)) or {}
        self._step.check = _nothing  # the step is finished from here on


class _Replayable:
    """A stream that several nodes can read one after the other, each from its beginning."""

    def __init__(self, stream: Iterable[Databuffer]) -> None:
        self._stream = iter(stream)
        self._parts: list[Databuffer] = []

    def __iter__(self) -> Iterator[Databuffer]:
        yield from self._parts
        for part in self._stream:
            self._parts.append(part)
            yield part


def _nothing() -> None:
    """Do nothing."""


# ---------------------------------------------------------------- the worker


class Worker:
    """The roles' learners (`models`) and their chain. The first role that trains, usually the actor, is published.

    `steps` counts batches. `generates` says whether the chain's source asks this worker's own engine for the samples of
    each step; otherwise it takes samples of others. `kept` are the values that the last step reports for episodes that
    the run may keep, for this rank's rows.
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
        """Run the chain on one batch, some of whose parts may still be on their way; return the metrics.

        An error of `check` or `parts` before the first update abandons the step: weights and optimizers are unchanged.
        The chain's last node calls `publish`, with the new weights in place.
        """

        def rows() -> Iterator[Databuffer]:
            return (part if isinstance(part, Databuffer) else Databuffer(part) for part in parts)

        step = Step(
            number=self.steps,
            config=self._config,
            algorithm=self._algorithm,
            models=self._models,
            peers=in_teams(self._peers, self._config),
            fetch=self._wrong_source if self.generates else rows,
            generate=rows if self.generates else self._wrong_source,
            publish=publish,
            check=check,
            seed=self._seed,
        )
        metrics = Pipeline(self._chain, step, self._clock).run()
        self.steps += 1
        # The ranks of a team have the same rows: its first one reports them.
        self.kept = [] if self._peers.rank % self._config.team else step.kept.values()
        if self._peers.rank == 0:
            self._watch.see(metrics, truncated=self._config.truncate is not None)
        return finite(metrics)

    def _wrong_source(self) -> Iterator[Databuffer]:
        source = self._chain.nodes[0]
        raise GraphError(
            f"node {source.id} of kind {source.kind} asks the step for the other kind of source",
            f"let its function call step.{source.kind}(), or declare the other kind",
        )

    # ------------------------------------------------------------ weights and state

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the weights as engines load them, tied ones under each of their names, until the next step: on rank 0,
        which publishes them, and on every rank that samples with its own engine. Collective."""
        return self._main.weights(dtype, here=self._peers.rank == 0 or self.generates)

    def shards(self, dtype: torch.dtype) -> Shards:
        """Return this rank's part of the weights. Collective."""
        return self._main.shards(dtype)

    def adapter(self) -> Adapter | None:
        """Return the adapter of a LoRA policy; None for any other policy."""
        return self._main.adapter()

    def prober(self, settings: PolicyConfig) -> Callable[[], Probe | None]:
        """Return the function that makes the probe of each published version. Models without log-probs have none."""
        if not settings.proves or "actor" not in self._models:
            return _nothing
        return Prober(self._models["actor"], settings)

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the exact weights of everything that trains, each tied one once."""
        return {
            prefix + name: tensor
            for prefix, optimizer in self._trained()
            for name, tensor in optimizer.masters().items()
        }

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizers' states, by `moment/parameter`."""
        return {
            prefix + name: tensor
            for prefix, optimizer in self._trained()
            for name, tensor in (*optimizer.moments().items(), (_UPDATES, torch.tensor(optimizer.steps)))
        }

    def restore(self, masters: Tensors, moments: Tensors, steps: int) -> None:
        """Continue exactly from these `masters`, `moments` and `steps`."""
        prefixes = [prefix for prefix, _ in self._trained() if prefix]
        for prefix, optimizer in self._trained():
            state = _of_role(moments, prefix, prefixes)
            made = int(state.pop(_UPDATES, torch.tensor(steps)))
            optimizer.restore(_of_role(masters, prefix, prefixes), state, made)
        self.steps = steps

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of all roles that train."""
        return [optimizer for _, optimizer in self._trained()]

    @property
    def _main(self) -> Optimizer:
        return self._trained()[0][1]

    def _trained(self) -> list[tuple[str, Optimizer]]:
        """Return the optimizers, each with the prefix of its tensors' names."""
        roles = sorted(self._models, key=lambda role: (role != "actor", role))
        found = [(role, optimizer) for role in roles if (optimizer := self._models[role].optimizer) is not None]
        return [(f"{role}/" if place else "", optimizer) for place, (role, optimizer) in enumerate(found)]


def _of_role(tensors: Tensors, prefix: str, prefixes: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of one role, without its prefix."""
    others = tuple(other for other in prefixes if other != prefix)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.startswith(others)
    }


# ---------------------------------------------------------------- probes


class Prober:
    """Makes the probe of the current weights: the trainer's own log-probs of the probe's prompts.

    The model computes as it does in a step, in its own dtype and with its LoRA adapters separate: the rounding of a
    publication (a merged adapter, bf16 copies) is within the tolerance. All ranks of a sharded model take part.
    """

    def __init__(self, actor: Learner, settings: PolicyConfig) -> None:
        self._actor = actor
        self._tolerance = tolerance_of(settings)
        config: Any = actor.model.config
        self._prompts = prompts(config.get_text_config().vocab_size, settings.engine.context)
        tokens_RT = np.array(self._prompts, np.int32)
        rows, length = tokens_RT.shape
        self._data = Databuffer(
            replace(
                no_rows(),
                tokens_N=tokens_RT.reshape(-1),
                mask_N=np.tile(np.arange(length) > 0, rows),
                old_N=np.zeros(tokens_RT.size, np.float32),
                temperature_N=np.ones(tokens_RT.size, np.float32),
                start_R=np.arange(rows) * length,
                length_R=np.full(rows, length),
                kept_R=np.zeros(rows, np.int64),
            )
        )

    def __call__(self) -> Probe | None:
        """Return the probe, None if the log-probs are not finite. Collective if the model is sharded."""
        score_N = self._actor.infer(self._data)
        if not np.isfinite(score_N).all():
            log.warning("this version has no probe: its log-probs are not finite")
            return None
        rows = score_N.astype(np.float64).reshape(len(self._prompts), -1)[:, 1:].round(6)
        return Probe(prompts=self._prompts, logprobs=rows.tolist(), tolerance=self._tolerance)
