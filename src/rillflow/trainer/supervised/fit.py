"""A supervised run (`rillflow fit`): one rank's process, from the rows to the last checkpoint and the exported model.

Every rank runs this, on its own share of each batch. The order of actions makes a kill at any moment safe: the metrics
of a step are written before its checkpoint, and a run that continues from a checkpoint removes the metrics of later
steps from `metrics.jsonl`. The exported folder is a plain Hugging Face folder of a causal language model, or of a model
for sequence classification with one label.

Invariants: the lines of `metrics.jsonl` belong to the live weights, each once, numbered (`seq`) from 1, so a tracker
gets each of them once. A batch is a pure function of the seed and its number, so a run continues exactly from its step,
on any number of ranks; every row is in exactly one batch of each epoch; the ranks' parts of a batch are disjoint, cover
it and are balanced by tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from rillflow.config import PolicyConfig
from rillflow.config.supervised import FitRecipe
from rillflow.contracts import PromptSource
from rillflow.errors import DataError
from rillflow.storage import disk_errors, write_atomic
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.checkpoint import Checkpoints, State, random_state, restore_random
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.planner import plan
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.offload import check_offload
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone, Peers, Stopped
from rillflow.trainer.parallel.context import Context, in_teams
from rillflow.trainer.parallel.distributed import connect, device_of
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import shard
from rillflow.trainer.parallel.tensor import split
from rillflow.trainer.process import prepare_torch, stops_on_signal
from rillflow.trainer.roles import policy_model, scalar_model
from rillflow.trainer.supervised.examples import Examples, read_examples
from rillflow.trainer.supervised.functions import evaluate, graph_of
from rillflow.trainer.supervised.reward_model import quality_of
from rillflow.trainer.supervised.texts import Writer
from rillflow.weights.model_folder import FILE, Quality, RewardFacts
from rillflow.weights.models import fill_model, load_policy_model, load_scalar_model, new_folder, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.trainer.batches import Ints

log = logging.getLogger(__name__)

MODEL = "model"  # the folder of the finished model, in the run's folder


class Journal:
    """The file `metrics.jsonl`: one line for each step and each evaluation of held-out rows."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._lines = len(self.read())

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, without a partial line that a crash left."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def take_back(self, step: int) -> None:
        """Remove the lines of later steps."""
        lines = [line for line in self.read() if line["step"] <= step]
        self._lines = len(lines)
        write_atomic(self._path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def add(self, step: int, values: Mapping[str, float], event: str | None = None) -> None:
        self._lines += 1
        kind = {} if event is None else {"event": event}
        line = {"step": step, "seq": self._lines, "time": self._now(), **kind, **values}
        with disk_errors(self._path), open(self._path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def sync(self) -> None:
        """Make the added lines durable."""
        if self._path.exists():
            with disk_errors(self._path), open(self._path, "ab") as file:
                os.fsync(file.fileno())


# ---------------------------------------------------------------- which rows are in a batch


class StaticBatches:
    """Endless batches of row numbers, in a new order every epoch unless `shuffle` is off. The last batch of an epoch
    may be smaller.

    `lengths` are the rows' tokens, by which ranks are balanced; by default all rows count the same.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        peers: Peers | None = None,
        lengths: Sequence[int] | Ints | None = None,
        *,
        shuffle: bool = True,
    ) -> None:
        if count < 1 or batch_size < 1:
            raise DataError(f"{count} rows cannot be cut into batches of {batch_size}", "give at least one row")
        if lengths is not None and len(lengths) != count:
            raise DataError(f"got {len(lengths)} lengths for {count} rows", "give one for each row")
        self._count = count
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._peers: Peers = peers or Alone()
        self._length_R: Ints = np.ones(count, np.int64) if lengths is None else np.asarray(lengths, np.int64)
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    @property
    def batches_per_epoch(self) -> int:
        return -(-self._count // self._batch_size)

    def epoch(self, step: int) -> int:
        return step // self.batches_per_epoch

    def batch(self, step: int) -> Ints:
        """Return all rows of batch number `step`."""
        begin = step % self.batches_per_epoch * self._batch_size
        return self._epoch_order(self.epoch(step))[begin : begin + self._batch_size]

    def take(self, step: int) -> Ints:
        """Return this rank's rows of batch number `step`, perhaps none."""
        return self.part_of(step, self._peers.rank, self._peers.size)

    def part_of(self, step: int, rank: int, ranks: int) -> Ints:
        row_B = self.batch(step)
        own_B: Ints = row_B[balanced(self._length_R[row_B], ranks) == rank]
        return own_B

    def _epoch_order(self, epoch: int) -> Ints:
        if not self._shuffle:
            return np.arange(self._count)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return self._order[1]


def balanced(length_B: Ints, ranks: int) -> Ints:
    """Return a rank for each row: the longest rows first, each to the rank with the fewest tokens."""
    owner_B = np.empty(len(length_B), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for row in np.argsort(-length_B, kind="stable").tolist():
        load, rank = loads[0]
        owner_B[row] = rank
        heapq.heapreplace(loads, (load + int(length_B[row]), rank))
    return owner_B


# ---------------------------------------------------------------- model, learner and step graph


@dataclass(frozen=True)
class Trained:
    """The worker of a step graph with one model that learns."""

    worker: Worker
    learner: Learner
    model: PreTrainedModel


def assemble(recipe: FitRecipe, peers: Peers, device: torch.device) -> Trained:
    config = recipe.trainer
    check_offload(config, device)
    # Only the shards of a sharded model reach the device.
    parts = config.sharding == "fsdp" or config.tensor_ranks > 1
    loaded_on = torch.device("cpu") if parts and peers.size > 1 else device
    model, role = _model(recipe, loaded_on)
    shard(model, config, peers, device)
    context = Context.of(config, peers)
    split(model, config, peers, context.group, device)
    optimizer = Optimizer(model, config, peers)
    made: Callable[..., Any] = PolicyForward if role == "actor" else ScalarForward
    forward = made(model, config, context=context)
    learner = Learner(role, model, forward, optimizer, config, peers, in_order=recipe.runtime.deterministic)
    chain = plan(graph_of(recipe), ranks=in_teams(peers, config).size)
    # A worker requires an algorithm; no node of these graphs uses it.
    worker = Worker(chain, {role: learner}, ALGORITHMS[config.algorithm](config), config, peers)
    return Trained(worker, learner, model)


def _model(recipe: FitRecipe, device: torch.device) -> tuple[PreTrainedModel, str]:
    if recipe.task == "sft":
        settings = PolicyConfig(model=recipe.model, trainer=recipe.trainer)
        return policy_model(settings, device, seed=recipe.seed), "actor"
    return scalar_model(recipe.model, device, recipe.trainer, seed=recipe.seed), "reward"


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Progress:
    """The progress after a step: `values` of the last step, `heldout` of the last evaluation."""

    step: int
    steps: int
    values: Mapping[str, float]
    heldout: Mapping[str, float]


class Fit:
    """One supervised run in its folder."""

    def __init__(
        self,
        recipe: FitRecipe,
        folder: Path,
        trained: Trained,
        peers: Peers,
        *,
        examples: Examples,
        heldout: Examples | None = None,
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        config = recipe.trainer
        self._recipe = recipe
        self._trained = trained
        self._worker = trained.worker
        self._examples = examples
        self._heldout = heldout
        self._peers = peers
        self._teams = in_teams(peers, config)
        self._stop = stop
        self._report = report
        self._checkpoints = Checkpoints(folder / "checkpoints" / "model", config.keep_checkpoints, peers)
        self._journal = Journal(folder / "metrics.jsonl")
        self._batches = StaticBatches(
            len(examples),
            config.batch_groups,
            recipe.seed,
            self._teams,
            examples.lengths,
            shuffle=recipe.data.shuffle,
        )
        self._hash = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
        self._saved = 0
        self._values: Mapping[str, float] = {}
        self._seen: Mapping[str, float] = {}

    @property
    def steps(self) -> int:
        """Return the optimizer steps of the whole run."""
        bounds = [self._recipe.trainer.steps] if self._recipe.bounded else []
        if self._recipe.data.epochs is not None:
            bounds.append(self._recipe.data.epochs * self._batches.batches_per_epoch)
        return min(bounds)

    def heldout(self) -> Mapping[str, float]:
        """Return the model's metrics on the held-out rows; empty without such rows. Collective."""
        if self._heldout is not None and not self._seen:  # a run that was resumed at its end
            self._seen = evaluate(self._recipe, self._trained.learner, self._heldout, self._teams, self._check)
        return self._seen

    def run(self) -> bool:
        """Train to the end and write a last checkpoint; return False if the run was stopped first."""
        self._restore()
        finished = self._train()
        if self._worker.steps != self._saved:
            self._save()
        self._checkpoints.finish()
        return finished

    def _train(self) -> bool:
        try:
            if self._worker.steps == 0:
                self._evaluate()
            while self._worker.steps < self.steps:
                if self._peers.highest([self._stop()])[0]:
                    return False
                self._step()
        except Stopped:
            return False
        return True

    def _restore(self) -> None:
        found = self._checkpoints.latest_valid(self._worker.masters())
        if self._peers.rank == 0:
            self._journal.take_back(-1 if found is None else found.state.step)
        if found is None:
            return
        if found.state.recipe != self._hash:
            log.warning("the recipe has changed since step %d: going on with the new one", found.state.step)
        self._worker.restore(found.masters, found.moments, found.state.step)
        restore_random(found.state.random_of(self._peers.rank))
        self._saved = found.state.step

    # ------------------------------------------------------------ one step

    def _step(self) -> None:
        number = self._worker.steps
        wanted = self._batches.take(number)
        self._values = self._worker.step([self._examples.take(wanted.tolist())], self._check)
        done = number + 1
        self._write(done, self._values)
        every = self._recipe.evaluate_every
        if done == self.steps or (every and done % every == 0):
            self._evaluate()
        self._report(Progress(done, self.steps, self._values, self._seen))
        if done % self._recipe.trainer.checkpoint_every == 0:
            self._save()

    def _check(self) -> None:
        """Raise Stopped between two micro-batches. Several ranks stop together, between two steps."""
        if self._peers.size == 1 and self._stop():
            raise Stopped

    def _evaluate(self) -> None:
        if self._heldout is None:
            return
        self._seen = evaluate(self._recipe, self._trained.learner, self._heldout, self._teams, self._check)
        self._write(self._worker.steps, self._seen, "evaluation")

    def _write(self, step: int, values: Mapping[str, float], event: str | None = None) -> None:
        if self._peers.rank == 0:
            self._journal.add(step, values, event)

    def _save(self) -> None:
        step = self._worker.steps
        if self._peers.rank == 0:
            self._journal.sync()
        state = State(version=step, step=step, recipe=self._hash, random=random_state())
        self._checkpoints.begin(state, self._worker.masters(), self._worker.moments())
        self._saved = step


# ---------------------------------------------------------------- the exported model


def export(recipe: FitRecipe, trained: Trained, target: Path, peers: Peers, quality: Quality | None = None) -> None:
    """Write the model; a folder from an earlier end of this run is replaced. Collective."""
    weights = trained.worker.weights(torch.float32)
    if peers.rank > 0:
        return
    with disk_errors(target):
        shutil.rmtree(target, ignore_errors=True)
    with new_folder(target) as folder:
        loaded = _loaded(recipe)
        fill_model(loaded, weights)
        save_model(loaded, recipe.model, folder)
        if recipe.task != "sft":
            known = {name: value for name in ("loss", "separator") if (value := getattr(recipe, name)) is not None}
            facts = RewardFacts(task=recipe.task, quality=quality, **known)
            (folder / FILE).write_bytes(msgspec.json.encode(facts))


def _loaded(recipe: FitRecipe) -> PreTrainedModel:
    """Load the model as it was before training: the trained one may be sharded, wrapped or in another precision."""
    cpu = torch.device("cpu")
    return (
        load_policy_model(recipe.model, "fp32", cpu)
        if recipe.task == "sft"
        else load_scalar_model(recipe.model, "fp32", cpu)[0]
    )


# ---------------------------------------------------------------- one rank's process


def run_fit(
    recipe: FitRecipe,
    folder: Path,
    train: PromptSource,
    heldout: PromptSource | None,
    *,
    place: Place | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> bool:
    """Train to the end and export the model; return False if a signal came first.

    A restarted run continues from its last checkpoint. Each of several ranks runs this at its own `place`.
    """
    stop = threading.Event()
    place = place or Place()
    device = device_of(recipe.trainer.device, place.rank)
    with stops_on_signal(stop), connect(place, device) as peers:
        prepare_torch(recipe.seed, recipe.runtime.threads, deterministic=recipe.runtime.deterministic)
        trained = assemble(recipe, peers, device)
        writer = Writer.load(recipe.model)
        longest = recipe.data.longest or int(getattr(trained.model.config, "max_position_embeddings", 1 << 30))
        fit = Fit(
            recipe,
            folder,
            trained,
            peers,
            examples=_read(train, recipe.data.train.origin, recipe, writer, longest),
            heldout=None if heldout is None else _read(heldout, "data.heldout", recipe, writer, longest),
            stop=stop.is_set,
            report=report,
        )
        if not fit.run():
            return False
        export(recipe, trained, folder / MODEL, peers, quality_of(fit.heldout()))
    return True


def _read(source: PromptSource, origin: str, recipe: FitRecipe, writer: Writer, longest: int) -> Examples:
    examples = read_examples(source, origin, recipe, writer, longest)
    if examples.left_out:
        log.warning("%s: left out %d rows with more than %d tokens", origin, examples.left_out, longest)
    return examples
