"""The batches of a trainer: the stream that it asks for them, the stream of several ranks, and a batch in parts.

`Stream` is the blocking view of the dataflow service that the loop uses; `remote_stream.RemoteStream` is the real one.
`RankStream` joins the streams of several ranks. Rank 0 leases; the others learn under which attempt, and each leases
and reads its own part of the batch, so no row passes through another rank. `Parts` leases one batch part by part under
one attempt until it is complete.

Invariants: every group of a batch is read exactly once, in the order in which the parts were served. All ranks see the
same parts (their own rows of them, perhaps none), the same end and the same errors: a rank that loses the batch, cannot
read it or was asked to stop takes all of them out of the step. Every wait is bounded, and time spent waiting for parts
is not counted as time of the step.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from rillflow.clients.payloads import DamagedRows
from rillflow.contracts import Clock, Generator
from rillflow.errors import CorruptData, DeadlineExceeded, LeaseLost
from rillflow.storage.spans import NoSpans, Spans
from rillflow.trainer.batches import Part, no_rows, nothing_staged
from rillflow.trainer.parallel import Alone, Peers, RunOver, Stopped
from rillflow.types import Batch, BatchReply, KeptTokens, Probe, TrainerJoined

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

# Seconds that one call waits for a part: short, so that a signal is noticed soon.
POLL = 1.0


@dataclass(frozen=True)
class StepRecord:
    """A step to commit: its batch, the version that it made, and its measurements.

    `restorable` is the oldest version that a checkpoint can restore. `kept` are values for episodes that the run keeps.
    """

    batch: Batch
    version: int
    metrics: dict[str, float]
    step_seconds: float
    wait_seconds: float
    restorable: int
    kept: Sequence[KeptTokens] = ()


class Stream(Protocol):
    """The dataflow service, seen by one trainer of one policy. It holds at most one batch at a time."""

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        """Take over from version `checkpoint`; `published` is the highest version in the weight store."""

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        """Return what follows after the first `have` groups of the attempt's batch, or no batch after `wait` seconds.

        The call can be repeated. A new attempt abandons an earlier batch. LeaseLost if this trainer no longer has the
        batch, or for `have` 0 no longer the right to ask for one.
        """

    def read(self, part: Batch) -> Part:
        """Return the verified rows of a part. DamagedRows names damaged rows, which have been reported."""

    def check(self) -> None:
        """Report that the step goes on; LeaseLost if the batch is known to be lost."""

    def abandon(self) -> None:
        """Stop renewing the lease of the batch."""

    def commit(self, record: StepRecord) -> None:
        """Commit batch and version together; LeaseLost if this trainer no longer has the batch."""


# ---------------------------------------------------------------- several ranks


class RankStream:
    """The stream of one rank of several; `own` asks for this rank's rows.

    A step in `lockstep` calls `check` equally often on all ranks, so they agree on errors there: a rank that left alone
    would leave the others inside the model. Otherwise the others notice at their next collective.
    `staged` are the columns that stages added; `experts`: samples have the engine's choices of experts.
    """

    def __init__(
        self,
        own: Stream,
        peers: Peers,
        *,
        stop: Callable[[], bool],
        lockstep: bool,
        staged: Sequence[str] = (),
        experts: bool = False,
    ) -> None:
        self._own = own
        self._peers = peers
        self._stop = stop
        self._lockstep = lockstep
        self._staged = staged
        self._experts = experts

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        """Join the run. Only rank 0 calls this."""
        return self._own.join(checkpoint, published)

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        """Lease this rank's part under the attempt of rank 0. Collective."""
        if self._stop():
            self._peers.agree(Stopped())
        reply = self._asked(version, attempt, wait, have) if self._peers.rank == 0 else _NO_REPLY
        news = _REPLY.decode(self._peers.first(_without_samples(reply)))
        if news.batch is None:
            return news
        if self._peers.rank:
            reply = self._asked(version, news.batch.attempt, 0.0, have)
        if any(self._peers.highest([reply.batch is None])):
            # The next call under the same attempt gets the same answer.
            return BatchReply(batch=None, phase=news.phase, waiting_for="the dataflow service to answer every rank")
        assert reply.batch is not None
        return BatchReply(batch=_up_to(reply.batch, news.batch), phase=news.phase)

    def _asked(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        try:
            return self._own.lease(version, attempt, wait, have)
        except LeaseLost as error:
            self._peers.agree(error)
            raise

    def read(self, part: Batch) -> Part:
        """Read this rank's rows. Collective, also for ranks without samples in this part."""
        try:
            rows = self._own.read(part) if part.samples else self._no_part()
        except DamagedRows as error:
            self._peers.agree(error)
            raise
        self._peers.agree(None)
        return rows

    def _no_part(self) -> Part:
        nothing = self._staged or self._experts
        return nothing_staged(self._staged, experts=self._experts) if nothing else no_rows()

    def check(self) -> None:
        error = self._error()
        if self._lockstep or error is not None:
            self._peers.agree(error)

    def _error(self) -> Exception | None:
        if self._stop():
            return Stopped()
        try:
            self._own.check()
        except LeaseLost as error:
            return error
        return None

    def abandon(self) -> None:
        self._own.abandon()

    def commit(self, record: StepRecord) -> None:
        """Commit the step. Only rank 0 calls this."""
        self._own.commit(record)


_NO_REPLY = BatchReply(batch=None, phase="training")
# Built at import: msgspec crashes if several threads decode a type for the first time.
_REPLY = msgspec.msgpack.Decoder(BatchReply)


def _without_samples(reply: BatchReply) -> bytes:
    batch = reply.batch and msgspec.structs.replace(reply.batch, samples=[])
    return msgspec.msgpack.encode(msgspec.structs.replace(reply, batch=batch))


def _up_to(own: Batch, news: Batch) -> Batch:
    """Return the groups that rank 0 knows. If the batch has grown since, the rest comes with the next part."""
    samples = [sample for sample in own.samples if sample.member < news.groups]
    return msgspec.structs.replace(own, samples=samples, groups=news.groups, complete=news.complete)


# ---------------------------------------------------------------- one batch, part by part


class NoBatch(DeadlineExceeded):
    """No batch arrived for `batch_wait` seconds. A restarted trainer would wait as long again."""


class Parts:
    """The parts of one batch. Iterate once, after `open` has returned True.

    A trainer that also rolls out has a `generator`, which samples with `weights` after it has reproduced their `probe`.
    It samples while a part is waited for and at no other time: a part that arrives preempts it. In `spans` the worker
    is at `train` except while it waits. All ranks of a trainer go through equally many parts.
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
        self.opening = 0.0  # seconds until the first part arrived
        self.waited = 0.0  # seconds of waiting for later parts

    @property
    def batch(self) -> Batch:
        """Return the batch as last reported."""
        assert self._batch is not None, "no batch is leased yet"
        return self._batch

    def open(self) -> bool:
        """Wait for the first part; return False if none will come. LeaseLost: another trainer has taken over."""
        asked = self._clock.monotonic()
        try:
            self._batch = self._next(have=0)
        except LeaseLost as error:
            # Perhaps only this attempt is lost: it may have leased a batch in a lost answer, and lost the batch since.
            log.warning("no batch yet, asking under a new attempt: %s", error)
            self._attempt = uuid.uuid4().hex
            self._batch = self._next(have=0)
        self.opening = self._clock.monotonic() - asked
        return self._batch is not None

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts. LeaseLost if the batch is lost, DamagedRows if it cannot be read, Stopped, RunOver."""
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
        """Return what follows after `have` groups; None if nothing will. NoBatch names the missing condition."""
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
                raise self._no_batch(reply)
        return None

    def _no_batch(self, reply: BatchReply) -> NoBatch:
        return NoBatch(
            f"no batch within {self._patience:.0f} s, waiting for {reply.waiting_for or 'samples'}",
            "read the rollout nodes' logs; if all groups have equal rewards, stop earlier (trainer.steps) "
            "or train without dataflow.filters; trainer.batch_wait sets how long a trainer waits",
        )
