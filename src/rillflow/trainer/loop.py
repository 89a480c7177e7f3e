"""The trainer's loop: join, then lease, step, publish, commit, and a checkpoint every so often.

Order is what makes a kill at any moment safe:

1. A version is published before its batch is committed, so a committed version can always be pulled.
2. A checkpoint of a version is written after that version is committed, so a trainer never restarts from weights
   that the ledger does not know.
3. A restart takes the newest valid checkpoint c, joins with c (the ledger returns what was committed after c),
   rewinds the store to c (later versions become orphans) and goes on above the highest number ever used.

A batch that was leased and not committed returns to the stream by itself. One that is lost or cannot be read before
its update is abandoned, and another is leased. When a commit finds the lease lost, or the answer to it is lost for
good, this process's weights are on no line: the error ends the process, and its supervisor starts it again at step 3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rillflow.clients.payloads import DamagedRows
from rillflow.config import TrainerConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import LeaseLost, RillflowError, RunError
from rillflow.trainer.checkpoint import Checkpoint, Checkpoints, State, random_state, restore_random
from rillflow.trainer.parts import Parts, Stopped
from rillflow.trainer.step import Learner
from rillflow.trainer.stream import Stream
from rillflow.weights import FolderStore

log = logging.getLogger(__name__)

# Versions that stay pullable for nodes that lag, besides those that checkpoints need.
KEEP_VERSIONS = 4
# Batches in a row that may be abandoned: whatever takes them away or damages them does not pass by itself.
MOST_ABANDONED = 8


@dataclass(frozen=True)
class StepReport:
    step: int
    version: int
    metrics: dict[str, float]


class TrainerLoop:
    """Runs until the dataflow service has no more batches, or `stop` says so."""

    def __init__(
        self,
        stream: Stream,
        learner: Learner,
        store: FolderStore,
        checkpoints: Checkpoints,
        config: TrainerConfig,
        *,
        publish_dtype: torch.dtype = torch.float32,
        recipe_hash: str = "",
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[StepReport], None] = lambda report: None,
        clock: Clock | None = None,
    ) -> None:
        self._stream = stream
        self._learner = learner
        self._store = store
        self._checkpoints = checkpoints
        self._config = config
        self._dtype = publish_dtype
        self._recipe = recipe_hash
        self._stop = stop
        self._report = report
        self._clock = clock or SystemClock()
        self._version = 0
        self._next = 1
        self._saved = 0
        self._abandoned = 0

    def run(self) -> None:
        self._begin()
        try:
            while self._wants_more() and self._train_next():
                pass
        except Stopped:
            log.info("step abandoned: its batch returns to the stream")
        finally:
            self._stream.abandon()
        if self._version != self._saved:
            self._checkpoint()

    def _wants_more(self) -> bool:
        """A policy that has done its steps is finished, though the run goes on while others have not."""
        return not self._stop() and self._learner.steps < self._config.steps

    # ------------------------------------------------------------ start

    def _begin(self) -> None:
        """Restore, take over the line and learn which version number comes next."""
        self._version = self._saved = self._restore()
        weights = self._learner.weights(self._dtype)
        if self._store.highest() < self._version:
            # A store without this version's number: a new run, or one whose weights were removed.
            self._store.publish(weights, self._version, parent=None)
        else:
            self._store.mend(weights, self._version)
        joined = self._stream.join(self._version, self._store.highest())
        if joined.version != self._version:
            raise RunError(
                f"the ledger stands at version {joined.version}, the checkpoint at {self._version}",
                "checkpoints and ledger are of different runs: resume with the run's own folder",
            )
        orphaned = self._store.rewind(self._version)
        self._next = max(self._store.highest(), joined.highest) + 1
        log.info("from version %d; orphaned %s; next version %d", self._version, orphaned, self._next)

    def _restore(self) -> int:
        found = self._checkpoints.latest_valid()
        if found is None:
            return 0
        if found.state.recipe != self._recipe:
            log.warning("the recipe has changed since checkpoint %d: going on with the new one", found.state.version)
        self._learner.restore(found.masters, found.moments, found.state.step)
        restore_random(found.state.random)
        return found.state.version

    # ------------------------------------------------------------ one step

    def _train_next(self) -> bool:
        """One step, or an attempt at one; False when there will be no more batches."""
        parts = Parts(self._stream, self._version, patience=self._config.batch_wait, stop=self._stop, clock=self._clock)
        if not parts.open():
            return False
        started = self._clock.monotonic()
        try:
            metrics = self._learner.step(parts, self._check)
        except (LeaseLost, DamagedRows) as error:
            self._abandon(parts, error)
            return True
        self._abandoned = 0
        self._finish(parts, metrics | {"wait_seconds": parts.waited}, started)
        return True

    def _check(self) -> None:
        """Between two micro-batches: whether the step is still worth its time."""
        if self._stop():
            raise Stopped
        self._stream.check()

    def _abandon(self, parts: Parts, error: RillflowError) -> None:
        """Give the batch up, its gradients are gone already; the next attempt leases another."""
        self._stream.abandon()
        self._abandoned += 1
        log.warning("batch %s is abandoned: %s", parts.batch.id, error)
        if self._abandoned > MOST_ABANDONED:
            raise RunError(
                f"{self._abandoned} batches in a row were lost or damaged, the last one: {error.message}",
                "check the disks and logs of the storage units; `rillflow audit` names what was set aside",
            ) from error

    def _finish(self, parts: Parts, metrics: dict[str, float], started: float) -> None:
        """Publish what the step made, commit its batch and write down what is due."""
        version = self._next
        self._store.publish(self._learner.weights(self._dtype), version, parent=self._version)
        self._stream.commit(
            parts.batch,
            version,
            metrics,
            step=self._clock.monotonic() - started - parts.waited,
            wait=parts.opening + parts.waited,
            restorable=min(self._checkpoints.versions(), default=0),
        )
        self._version = version
        self._next = version + 1
        if self._learner.steps % self._config.checkpoint_every == 0:
            self._checkpoint()
        # Version 0 stays: a run whose checkpoints were removed begins there again.
        self._store.prune(KEEP_VERSIONS, protect={0, *self._checkpoints.versions()})
        self._report(StepReport(step=self._learner.steps, version=version, metrics=metrics))

    def _checkpoint(self) -> None:
        state = State(version=self._version, step=self._learner.steps, recipe=self._recipe, random=random_state())
        self._checkpoints.save(
            Checkpoint(state=state, masters=self._learner.masters(), moments=self._learner.moments())
        )
        self._saved = self._version
