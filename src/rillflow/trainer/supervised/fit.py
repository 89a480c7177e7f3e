"""Supervised training from its first step to an exported model: `rillflow fit`.

Every rank runs this, on its own share of each batch. Order is what makes a kill at any moment safe: what a step has to
say is written before the checkpoint of that step, and what was written about steps after the checkpoint is taken back
when a run goes on from it. Which rows are in a batch follows from the step's number alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rillflow.config.supervised import FitRecipe
from rillflow.trainer.checkpoint import Checkpoints, State, random_state, restore_random
from rillflow.trainer.parallel.dataloader import StaticBatches
from rillflow.trainer.parallel.peers import Peers, Stopped
from rillflow.trainer.supervised.assembly import Trained
from rillflow.trainer.supervised.evaluation import evaluate
from rillflow.trainer.supervised.examples import Examples
from rillflow.trainer.supervised.journal import Journal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What a run says of itself after each step: `values` of the last step, `heldout` of the last evaluation."""

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
        self._stop = stop
        self._report = report
        self._checkpoints = Checkpoints(folder / "checkpoints" / "model", config.keep_checkpoints, peers)
        self._journal = Journal(folder / "metrics.jsonl")
        self._batches = StaticBatches(
            len(examples),
            config.batch_groups,
            recipe.seed,
            peers,
            examples.lengths,
            shuffle=recipe.data.shuffle,
        )
        self._hash = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
        self._saved = 0
        self._values: Mapping[str, float] = {}
        self._seen: Mapping[str, float] = {}

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        bounds = [self._recipe.trainer.steps] if self._recipe.bounded else []
        if self._recipe.data.epochs is not None:
            bounds.append(self._recipe.data.epochs * self._batches.batches_per_epoch)
        return min(bounds)

    def run(self) -> bool:
        """Train to the end, with a durable checkpoint there; False when it was stopped before."""
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
        """Between two micro-batches. One rank of several must not stop alone: they are asked between two steps."""
        if self._peers.size == 1 and self._stop():
            raise Stopped

    def _evaluate(self) -> None:
        if self._heldout is None:
            return
        self._seen = evaluate(self._recipe, self._trained.learner, self._heldout, self._peers, self._check)
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
