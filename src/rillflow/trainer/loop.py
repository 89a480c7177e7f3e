"""The trainer's loop: join, then lease, step, publish, commit, and a checkpoint every so often.

Order is what makes a kill at any moment safe:

1. A version is published before its batch is committed, so a committed version can always be pulled.
2. A checkpoint of a version is written after that version is committed, so a trainer never restarts from weights
   that the ledger does not know.
3. A restart takes the newest valid checkpoint c, joins with c (the ledger returns what was committed after c),
   rewinds the store to c (later versions become orphans) and goes on above the highest number ever used.

A batch that was leased and not committed returns to the stream by itself. When a commit finds the lease lost, or the
answer to it is lost for good, this process's weights are on no line: the error ends the process, and its supervisor
starts it again at step 3.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rillflow.config import TrainerConfig
from rillflow.errors import DeadlineExceeded, RunError
from rillflow.trainer.checkpoint import Checkpoint, Checkpoints, State, random_state, restore_random
from rillflow.trainer.step import Learner, Stopped
from rillflow.trainer.stream import Stream
from rillflow.types import Batch
from rillflow.weights import FolderStore

log = logging.getLogger(__name__)

# How long one call waits for a batch: short, so that a signal is seen soon.
POLL = 1.0
# Versions that stay pullable for nodes that lag, besides those that checkpoints need.
KEEP_VERSIONS = 4


@dataclass(frozen=True)
class StepReport:
    step: int
    version: int
    metrics: dict[str, float]


class NoBatch(DeadlineExceeded):
    """There was nothing to train on for `batch_wait` seconds: a trainer started anew would wait as long again."""


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
        self._version = 0
        self._next = 1
        self._saved = 0

    def run(self) -> None:
        self._begin()
        while not self._stop():
            asked = time.monotonic()
            batch = self._lease()
            if batch is None:
                break
            try:
                self._train(batch, wait=time.monotonic() - asked)
            except Stopped:
                log.info("step abandoned: batch %s returns to the stream", batch.id)
                break
        if self._version != self._saved:
            self._checkpoint()

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

    def _lease(self) -> Batch | None:
        """The next batch; None when there will be none. NoBatch says what it has waited for."""
        attempt = uuid.uuid4().hex
        deadline = time.monotonic() + self._config.batch_wait
        while not self._stop():
            left = deadline - time.monotonic()
            reply = self._stream.lease(self._version, attempt, max(min(POLL, left), 0.0))
            if reply.batch is not None:
                return reply.batch
            if reply.phase != "training":
                log.info("the run is %s", reply.phase)
                return None
            if left <= 0:
                raise NoBatch(
                    f"no batch within {self._config.batch_wait:.0f} s, waiting for {reply.waiting_for or 'samples'}",
                    "look at the rollout nodes' logs; if all groups have equal rewards, stop earlier (trainer.steps) "
                    "or train without dataflow.filters; trainer.batch_wait sets how long a trainer waits",
                )
        return None

    def _train(self, batch: Batch, wait: float) -> None:
        started = time.monotonic()
        metrics = self._learner.step(self._stream.read(batch), self._stop)
        version = self._next
        self._store.publish(self._learner.weights(self._dtype), version, parent=self._version)
        self._stream.commit(batch, version, metrics, step=time.monotonic() - started, wait=wait)
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
