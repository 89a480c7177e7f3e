"""The stream as the ranks of a trainer see it: each has its own part of the batch, all hear the same about it.

Rank 0 leases; the others are told under which attempt, and each leases its own part and reads it from the storage
units itself, so no row passes through another rank. Invariants: every rank sees the same parts (its own rows of them,
perhaps none), the same end and the same errors: a rank that loses the batch, cannot read it or was asked to stop takes
all of them out of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from rillflow.clients.payloads import DamagedRows
from rillflow.errors import LeaseLost
from rillflow.trainer.batches import no_rows
from rillflow.trainer.graph.databuffer import Part
from rillflow.trainer.parallel.peers import Peers, Stopped
from rillflow.trainer.staged import nothing_staged
from rillflow.trainer.stream import Stream
from rillflow.types import Batch, BatchReply, KeptTokens, TrainerJoined


class RankStream:
    """`own` is this rank's stream. `sharded`: a step calls `check` equally often on all ranks, which then agree there:
    a rank that left it alone would leave the others inside the model. Otherwise the others hear of it when they next
    speak to each other. `staged` are the columns that stages have added.
    """

    def __init__(
        self, own: Stream, peers: Peers, *, stop: Callable[[], bool], sharded: bool, staged: Sequence[str] = ()
    ) -> None:
        self._own = own
        self._peers = peers
        self._stop = stop
        self._sharded = sharded
        self._staged = staged

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        """Rank 0 only, as `commit`."""
        return self._own.join(checkpoint, published)

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        """Of all ranks together; the attempt of rank 0 is the one that counts."""
        if self._stop():
            self._peers.agree(Stopped())
        reply = self._asked(version, attempt, wait, have) if self._peers.rank == 0 else _SILENT
        news = _REPLY.decode(self._peers.first(_without_samples(reply)))
        if news.batch is None:
            return news
        if self._peers.rank:
            reply = self._asked(version, news.batch.attempt, 0.0, have)
        if any(self._peers.highest([reply.batch is None])):
            # Asked again under the same attempt, it answers the same.
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
        """Of all ranks together, also of those that have no samples in this part."""
        try:
            rows = self._own.read(part) if part.samples else self._nothing()
        except DamagedRows as error:
            self._peers.agree(error)
            raise
        self._peers.agree(None)
        return rows

    def _nothing(self) -> Part:
        return nothing_staged(self._staged) if self._staged else no_rows()

    def check(self) -> None:
        error = self._trouble()
        if self._sharded or error is not None:
            self._peers.agree(error)

    def _trouble(self) -> Exception | None:
        if self._stop():
            return Stopped()
        try:
            self._own.check()
        except LeaseLost as error:
            return error
        return None

    def abandon(self) -> None:
        self._own.abandon()

    def commit(
        self,
        batch: Batch,
        version: int,
        metrics: dict[str, float],
        *,
        step: float,
        wait: float,
        restorable: int,
        kept: Sequence[KeptTokens] = (),
    ) -> None:
        self._own.commit(batch, version, metrics, step=step, wait=wait, restorable=restorable, kept=kept)


_SILENT = BatchReply(batch=None, phase="training")
# Built here: msgspec crashes where several threads decode a type for the first time.
_REPLY = msgspec.msgpack.Decoder(BatchReply)


def _without_samples(reply: BatchReply) -> bytes:
    batch = reply.batch and msgspec.structs.replace(reply.batch, samples=[])
    return msgspec.msgpack.encode(msgspec.structs.replace(reply, batch=batch))


def _up_to(own: Batch, news: Batch) -> Batch:
    """What rank 0 has heard of; a batch that has grown since gives the rest with the next part."""
    samples = [sample for sample in own.samples if sample.member < news.groups]
    return msgspec.structs.replace(own, samples=samples, groups=news.groups, complete=news.complete)
