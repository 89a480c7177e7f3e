"""The trainer's loop: join, then lease, step, commit, publish, and a checkpoint every few steps.

The order of actions makes a kill at any moment safe:

1. A version is committed with its batch, then published from a copy of the weights while the next step computes. Its
   publication ends before the next version is committed, so the ledger is at most one version ahead of the store. That
   is harmless: nodes follow the store's head, and a node that learns of an unpublished version continues with its own
   as far as the staleness bound allows (with bound 0 it waits). Samples of a version follow its publication, and so its
   commit.
2. The last version of a run is published before it is committed, because a kill after the last commit must lose
   nothing. With `publish_delay` 0 or `publish_first` every version is: nodes may need it before they sample, or any
   commit may be the last.
3. The checkpoint of a version begins after that version is committed, so a trainer never restarts from weights that
   the ledger does not know. It may be durable before its version is published.
4. A restart loads the newest valid checkpoint c, publishes c if the store lacks it, joins with c (the ledger returns
   the batches committed after c), rewinds the store to c (later versions become orphans) and continues above the
   highest number that store or ledger has ever seen.

An error in the background (a full disk) ends the process before the next commit; nothing of it is visible.

A batch that was leased and not committed returns to the stream. A batch that is lost or cannot be read before its
update is abandoned, and another is leased. If a commit fails because the lease is lost, or its answer never arrives,
this process's weights are not part of the lineage: the error ends the process, and its supervisor starts it again at
step 4.

Every rank runs this loop, with the same decisions in the same order. Only rank 0 talks to the ledger and publishes (of
a sharded model, the files that all ranks have written). An error there ends all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.clients.payloads import DamagedRows
from rillflow.config import TrainerConfig, WeightsConfig
from rillflow.contracts import Clock, Generator, SystemClock, Trainer
from rillflow.errors import LeaseLost, RillflowError, RunError
from rillflow.storage import startup
from rillflow.storage.spans import NoSpans, Spans
from rillflow.trainer.checkpoint import Checkpoints, State, random_state, restore_random
from rillflow.trainer.parallel import Alone, Peers, RunOver, Stopped
from rillflow.trainer.process import StepProfiler
from rillflow.trainer.publisher import Publisher, Retention
from rillflow.trainer.shard_publisher import ShardPublisher
from rillflow.trainer.stream import Parts, StepRecord, Stream
from rillflow.types import KeptTokens
from rillflow.weights import FolderStore

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.types import Probe

log = logging.getLogger(__name__)

# Consecutive batches that may be abandoned; after that the cause is considered permanent.
MOST_ABANDONED = 8
# Built at import: msgspec crashes if several threads decode a type for the first time.
_KEPT = msgspec.msgpack.Decoder(list[KeptTokens])


def _no_probe() -> None:
    """Return no probe."""


@dataclass(frozen=True)
class StepReport:
    step: int
    version: int
    metrics: dict[str, float]


class TrainerLoop:
    """Runs until the dataflow service has no more batches, or `stop` returns True.

    `in_use` returns the versions that live nodes serve, `wanted` those that evaluations want kept; `published` is
    called after every change of the store. A `generator` samples while the loop waits for a batch, if the worker's
    graph generates. With `by_shards` the ranks of a sharded model publish together; otherwise rank 0 does. `probe`
    makes the probe of the current weights; all ranks call it together. `spans` record when it trains. A `profiler`
    profiles some steps.
    """

    def __init__(
        self,
        stream: Stream,
        worker: Trainer,
        store: FolderStore,
        checkpoints: Checkpoints,
        config: TrainerConfig,
        *,
        peers: Peers | None = None,
        publish_dtype: torch.dtype = torch.float32,
        publish_first: bool = False,
        recipe_hash: str = "",
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[StepReport], None] = lambda report: None,
        clock: Clock | None = None,
        generator: Generator | None = None,
        weights: WeightsConfig | None = None,
        in_use: Callable[[], Collection[int]] = tuple,
        wanted: Callable[[], Collection[int]] = tuple,
        published: Callable[[], None] = lambda: None,
        by_shards: bool = False,
        probe: Callable[[], Probe | None] = _no_probe,
        spans: Spans | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._stream = stream
        self._worker = worker
        self._store = store
        self._checkpoints = checkpoints
        keeps = weights or WeightsConfig()
        self._published = published
        self._peers = peers or Alone()
        retention = Retention(keeps.keep, keeps.retain, lambda: checkpoints.needed, in_use, wanted)
        self._shards = ShardPublisher(store, publish_dtype, self._peers, retention, published) if by_shards else None
        self._publisher = self._shards or Publisher(store, publish_dtype, retention, published)
        self._config = config
        self._dtype = publish_dtype
        self._recipe = recipe_hash
        self._stop = stop
        self._report = report
        self._clock = clock or SystemClock()
        self._generator = generator if generator is not None and worker.generates else None
        self._probe = probe
        self._proof: Probe | None = None  # the probe of the current weights
        self._spans = spans or NoSpans()
        self._profiler = profiler
        self._delayed = config.publish_delay > 0 and not publish_first
        self._version = 0
        self._next = 1
        self._saved = 0
        self._abandoned = 0

    def run(self) -> bool:
        """Train to the end; return False if this rank or another was stopped."""
        self._begin()
        startup.ready()
        try:
            with self._spans.doing("train"):
                stopped = self._train()
            self._end()
        except BaseException:
            self._publisher.close()
            self._checkpoints.close()
            raise
        if self._generator is not None and not stopped:
            # The engine serves the evaluation after the last step, until the run has ended.
            self._generator.begin(self._weights(), self._version, self._proof)
        return not stopped

    def _train(self) -> bool:
        """Make steps until the end; return whether the trainer was stopped."""
        try:
            while self._wants_more() and self._train_next():
                pass
        except Stopped as why:
            log.info("step abandoned: its batch returns to the stream")
            return not isinstance(why, RunOver)
        finally:
            self._stream.abandon()
            if self._profiler is not None:
                self._profiler.close()
        return self._stop()

    def _wants_more(self) -> bool:
        """Return whether steps are left. A policy may finish before the others of its run."""
        return not self._stop() and self._worker.steps < self._config.steps

    def _weights(self) -> Tensors:
        return self._worker.weights(self._dtype)

    # ------------------------------------------------------------ start and end

    def _begin(self) -> None:
        """Restore the checkpoint, take over the lineage and learn the next version number."""
        startup.doing("reading the last checkpoint")
        self._version = self._saved = self._restore()
        startup.doing("publishing the first weights" if self._version == 0 else "taking up the published weights")
        self._proof = self._probe()
        if self._shards is None:
            weights = self._weights()
            self._on_first(lambda: self._write_root(weights))
        else:
            self._write_root_of(self._shards)
        self._on_first(self._take_over)
        self._next = msgspec.json.decode(self._peers.first(msgspec.json.encode(self._next)), type=int)

    def _restore(self) -> int:
        found = self._checkpoints.latest_valid(self._worker.masters())
        if found is None:
            return 0
        if found.state.recipe != self._recipe:
            log.warning("the recipe has changed since checkpoint %d: going on with the new one", found.state.version)
        self._worker.restore(found.masters, found.moments, found.state.step)
        restore_random(found.state.random_of(self._peers.rank))
        return found.state.version

    def _write_root(self, weights: Tensors) -> None:
        if self._is_new():
            self._store.publish(weights, self._version, parent=None, probe=self._proof)
        else:
            self._store.mend(weights, self._version, self._proof)

    def _write_root_of(self, publisher: ShardPublisher) -> None:
        """Write the same by all ranks, if it is not there."""
        shards, there, error = self._worker.shards(self._dtype), [False], None

        def look() -> None:
            facts = shards.tensors, shards.aliases
            there[0] = not self._is_new() and self._store.has(self._version, *facts, self._proof)

        self._on_first(look)
        if not self._peers.first(b"there" if there[0] else b""):
            publisher.take_shards(shards, self._proof)
            publisher.begin(self._version, None)
            try:
                publisher.finish()
            except Exception as raised:
                error = raised
        self._peers.agree(error)

    def _is_new(self) -> bool:
        """Return whether the store lacks this version: the run is new, its weights were removed, or it ended between a
        checkpoint and the publication of its version."""
        return self._store.highest() < self._version

    def _take_over(self) -> None:
        joined = self._stream.join(self._version, self._store.highest())
        if joined.version != self._version:
            raise RunError(
                f"the ledger is at version {joined.version}, the checkpoint at {self._version}",
                "checkpoints and ledger belong to different runs: resume with the run's own folder",
            )
        orphaned = self._store.rewind(self._version)
        self._next = max(self._store.highest(), joined.highest) + 1
        self._published()
        log.info("from version %d; orphaned %s; next version %d", self._version, orphaned, self._next)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 only; if it fails, all ranks raise."""
        error: Exception | None = None
        if self._peers.rank == 0:
            try:
                action()
            except Exception as raised:
                error = raised
        self._peers.agree(error)

    def _end(self) -> None:
        """Write everything that is not written yet."""
        self._publisher.finish()
        if self._version != self._saved:
            self._checkpoint()
        self._checkpoints.finish()
        if self._peers.rank == 0:
            self._publisher.prune()

    # ------------------------------------------------------------ one step

    def _train_next(self) -> bool:
        """Make one step, or try to; return False if there will be no more batches."""
        self._publisher.check()
        self._checkpoints.check()
        parts = Parts(
            self._stream,
            self._version,
            patience=self._config.batch_wait,
            stop=self._stop,
            clock=self._clock,
            peers=self._peers,
            generator=self._generator,
            weights=self._weights,
            probe=self._proof,
            spans=self._spans,
        )
        if not parts.open():
            return False
        started = self._clock.monotonic()
        try:
            with self._profiler.around(self._worker.steps + 1) if self._profiler is not None else nullcontext():
                metrics = self._worker.step(parts, self._check, self._take)
        except (LeaseLost, DamagedRows) as error:
            self._abandon(parts, error)
            return True
        self._abandoned = 0
        self._finish(parts, metrics | {"wait_seconds": parts.waited} | self._publisher.statistics(), started)
        return True

    def _check(self) -> None:
        """Raise between two micro-batches if the step should be abandoned."""
        if self._stop():
            raise Stopped
        self._stream.check()

    def _abandon(self, parts: Parts, error: RillflowError) -> None:
        """Abandon the batch, whose gradients are already dropped; the next attempt leases another."""
        self._stream.abandon()
        self._abandoned += 1
        log.warning("abandoned batch %s: %s", parts.batch.id, error)
        if self._abandoned > MOST_ABANDONED:
            raise RunError(
                f"{self._abandoned} batches in a row were lost or damaged, the last one: {error.message}",
                "check the disks and logs of the storage units; `rillflow audit` names the rows that were lost",
            ) from error

    def _take(self) -> None:
        """Copy the new weights for publication and make their probe."""
        adapter, probe = self._worker.adapter(), self._probe()
        self._proof = probe
        if self._shards is not None:
            self._shards.take_shards(self._worker.shards(self._dtype), probe)
        elif adapter is None:
            weights = self._weights()
            if self._peers.rank == 0:
                self._publisher.take(weights, probe)
        else:
            # Rank 0 writes; all ranks of a sharded model gather what it needs.
            lost = self._peers.first(b"" if self._peers.rank or self._publisher.has_base else b"lost")
            weights = self._weights() if lost else {}
            if self._peers.rank == 0:
                self._publisher.take_adapter(adapter, lambda: weights, probe)

    def _finish(self, parts: Parts, metrics: dict[str, float], started: float) -> None:
        """Commit the batch, publish the copied weights and write a checkpoint if one is due."""
        version = self._next
        kept = self._kept_by_all()
        if self._shards is not None and self._peers.rank > 0:
            # Before the commit, because rank 0 may wait for it there. Without a commit the files are never sealed.
            self._shards.begin(version, self._version)
        self._on_first(lambda: self._commit_and_publish(parts, version, metrics, started, kept))
        self._version = version
        self._next = version + 1
        if self._worker.steps % self._config.checkpoint_every == 0:
            self._checkpoint()
        self._report(StepReport(step=self._worker.steps, version=version, metrics=metrics))

    def _kept_by_all(self) -> list[KeptTokens]:
        """Gather the values of kept episodes of all ranks on rank 0."""
        if self._peers.size == 1:
            return self._worker.kept
        nothing = [b""] * (self._peers.size - 1)
        messages = self._peers.exchange([msgspec.msgpack.encode(self._worker.kept), *nothing])
        return [one for message in messages if message for one in _KEPT.decode(message)]

    def _commit_and_publish(
        self, parts: Parts, version: int, metrics: dict[str, float], started: float, kept: list[KeptTokens]
    ) -> None:
        first = not self._delayed or self._worker.steps >= self._config.steps
        if first:
            self._publisher.publish(version, self._version)
        self._stream.commit(
            StepRecord(
                batch=parts.batch,
                version=version,
                metrics=metrics,
                step_seconds=self._clock.monotonic() - started - parts.waited,
                wait_seconds=parts.opening + parts.waited,
                restorable=min(self._checkpoints.versions(), default=0),
                kept=kept,
            )
        )
        if not first:
            self._publisher.begin(version, self._version)

    def _checkpoint(self) -> None:
        state = State(version=self._version, step=self._worker.steps, recipe=self._recipe, random=random_state())
        self._checkpoints.begin(state, self._worker.masters(), self._worker.moments())
        self._saved = self._version
