"""Batches of a fixed set of rows: which rows each rank takes at each step, without anybody telling it.

Invariants: a batch is a pure function of the seed and its number, whatever the number of ranks, so a run goes on
exactly from its number alone, on as many ranks as it likes; every row is in exactly one batch of each epoch; the ranks'
parts of a batch are disjoint, together the whole of it, and balanced by tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from rillflow.errors import DataError
from rillflow.trainer.parallel.peers import Alone, Peers

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints


class Cursor(TypedDict):
    """How many batches have been taken, of which set."""

    step: int
    count: int
    batch_size: int
    seed: int


class StaticBatches:
    """Endless batches of row numbers, in a new order every epoch unless `shuffle` is off. The last batch of an epoch
    may be smaller.

    `lengths` are the rows' tokens, by which ranks are balanced; without them all rows count the same.
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
            raise DataError(f"there are {len(lengths)} lengths of {count} rows", "give one for each row")
        self._count = count
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._peers: Peers = peers or Alone()
        self._length_R: Ints = np.ones(count, np.int64) if lengths is None else np.asarray(lengths, np.int64)
        self._step = 0
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    @property
    def batches_per_epoch(self) -> int:
        return -(-self._count // self._batch_size)

    def epoch(self, step: int) -> int:
        return step // self.batches_per_epoch

    def batch(self, step: int) -> Ints:
        """All rows of batch number `step`."""
        begin = step % self.batches_per_epoch * self._batch_size
        return self._epoch_order(self.epoch(step))[begin : begin + self._batch_size]

    def take(self, step: int) -> Ints:
        """This rank's rows of batch number `step`, perhaps none."""
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

    # ------------------------------------------------------------ the cursor

    def __iter__(self) -> Iterator[Ints]:
        """This rank's rows of one batch after the other, from where the cursor stands."""
        while True:
            self._step += 1
            yield self.take(self._step - 1)

    def state(self) -> Cursor:
        return Cursor(step=self._step, count=self._count, batch_size=self._batch_size, seed=self._seed)

    def restore(self, state: Cursor) -> None:
        here = self.state()
        changed = [name for name in ("count", "batch_size", "seed") if state[name] != here[name]]
        if changed or state["step"] < 0:
            raise DataError(
                f"the data has changed since it was last read: {', '.join(changed) or 'step'} is another",
                "resume with the data, the batch size and the seed that the run began with",
            )
        self._step = state["step"]


def balanced(length_B: Ints, ranks: int) -> Ints:
    """A rank for each row: the longest first, each to whoever has the fewest tokens."""
    owner_B = np.empty(len(length_B), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for row in np.argsort(-length_B, kind="stable").tolist():
        load, rank = loads[0]
        owner_B[row] = rank
        heapq.heapreplace(loads, (load + int(length_B[row]), rank))
    return owner_B
