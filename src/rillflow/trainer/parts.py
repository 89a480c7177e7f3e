"""A batch as it comes in: leased part by part under one attempt, until it is complete.

Invariant: every group of the batch is read exactly once, in the order in which the parts were served. Time spent
waiting for parts is kept apart from the time of the step; every wait for one is bounded by `patience`.

A trainer whose worker also rolls out has a generator, which samples with the weights that are trained, while a part is
waited for and at no other time. That a part is there preempts it; that the next is wanted lets it go on.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rillflow.contracts import Clock, Generator
from rillflow.errors import CorruptData, DeadlineExceeded, LeaseLost
from rillflow.storage.spans import NoSpans, Spans
from rillflow.trainer.graph.databuffer import Part
from rillflow.trainer.parallel.peers import Alone, Peers, RunOver, Stopped
from rillflow.trainer.stream import Stream
from rillflow.types import Batch, BatchReply, Probe

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

__all__ = ["NoBatch", "Parts", "RunOver", "Stopped"]
log = logging.getLogger(__name__)

# How long one call waits for a part: short, so that a signal is seen soon.
POLL = 1.0


class NoBatch(DeadlineExceeded):
    """There was nothing to train on for `batch_wait` seconds: a trainer started anew would wait as long again."""


class Parts:
    """Iterate it once, after `open` has said that there is a batch. `weights` are what a `generator` samples with, once
    it has reproduced their `probe`.

    In `spans` the worker is at `train` when it comes here, and not while it waits.

    All ranks of a trainer go through equally many parts, of which some may have no rows for one of them.
    """

    def __init__(
        self,
        stream: Stream,
        version: int,
        *,
        patience: float,
        stop: Callable[[], bool],
        clock: Clock,
        peers: Peers | None = None,
        generator: Generator | None = None,
        weights: Callable[[], Tensors] = dict,
        probe: Probe | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._stream = stream
        self._version = version
        self._patience = patience
        self._stop = stop
        self._clock = clock
        self._peers = peers or Alone()
        self._generator = generator
        self._weights = weights
        self._probe = probe
        self._spans = spans or NoSpans()
        self._attempt = uuid.uuid4().hex
        self._batch: Batch | None = None
        self.opening = 0.0  # seconds until the first part was there
        self.waited = 0.0  # seconds for the parts after it

    @property
    def batch(self) -> Batch:
        """The batch as last heard of."""
        assert self._batch is not None, "nothing is leased yet"
        return self._batch

    def open(self) -> bool:
        """Wait for the first part; False when none will come. LeaseLost: another trainer has taken over."""
        asked = self._clock.monotonic()
        try:
            self._batch = self._next(have=0)
        except LeaseLost as error:
            # Perhaps only of this attempt: it may have leased a batch in an answer that was lost, and lost it since.
            log.warning("no batch yet, asking under a new attempt: %s", error)
            self._attempt = uuid.uuid4().hex
            self._batch = self._next(have=0)
        self.opening = self._clock.monotonic() - asked
        return self._batch is not None

    def __iter__(self) -> Iterator[Part]:
        """Raises LeaseLost when the batch was taken away, DamagedRows when it cannot be read, Stopped."""
        samples = 0
        while True:
            part = self.batch
            samples += len(part.samples)
            if part.samples or self._peers.size > 1:
                yield self._stream.read(part)
            if part.complete:
                if not self._peers.total([samples])[0]:
                    raise CorruptData(f"batch {part.id} has no samples", "check the ledger with `rillflow audit`")
                return
            asked = self._clock.monotonic()
            self._batch = self._next(have=part.groups)
            self.waited += self._clock.monotonic() - asked
            if self._batch is None:
                raise Stopped if self._stop() else RunOver

    def _next(self, have: int) -> Batch | None:
        """What follows after `have` groups; None when nothing will. NoBatch says what it has waited for."""
        self._spans.end("train")
        try:
            return self._wait(have) if self._generator is None else self._generate(self._generator, have)
        finally:
            self._spans.begin("train")

    def _generate(self, generator: Generator, have: int) -> Batch | None:
        with self._spans.doing("switch"):
            generator.begin(self._weights(), self._version, self._probe)
        try:
            return self._wait(have)
        finally:
            with self._spans.doing("switch"):
                generator.end()

    def _wait(self, have: int) -> Batch | None:
        deadline = self._clock.monotonic() + self._patience
        while not self._stop():
            left = deadline - self._clock.monotonic()
            reply = self._stream.lease(self._version, self._attempt, max(min(POLL, left), 0.0), have)
            if reply.batch is not None and (reply.batch.groups > have or reply.batch.complete):
                return reply.batch
            if reply.phase != "training":
                log.info("the run is %s", reply.phase)
                return None
            if self._peers.highest([left <= 0])[0]:
                raise self._nothing(reply)
        return None

    def _nothing(self, reply: BatchReply) -> NoBatch:
        return NoBatch(
            f"no batch within {self._patience:.0f} s, waiting for {reply.waiting_for or 'samples'}",
            "look at the rollout nodes' logs; if all groups have equal rewards, stop earlier (trainer.steps) "
            "or train without dataflow.filters; trainer.batch_wait sets how long a trainer waits",
        )
