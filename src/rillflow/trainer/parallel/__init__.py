"""Ranks that train one policy together, as peers: the collectives among them.

All ranks call the same methods in the same order. Invariant: every rank gets exactly the same answer, so no two ranks
ever decide differently.

    launch          starts the ranks of this machine and watches them
    distributed     the collectives over torch.distributed, and how ranks find each other
    sharding        models that are sharded over the ranks
    context         teams of ranks, which share the tokens of micro-batches
    tensor          teams of ranks that share the weights of layers
    redistribute    databuffers between stages of different sizes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rillflow.errors import LeaseLost, RunError

if TYPE_CHECKING:
    import torch


class Stopped(Exception):
    """The trainer was asked to end: the step in progress is abandoned."""


class RunOver(Stopped):
    """The run ended before the batch was complete: the trainer has nothing left to do."""


class PeerLost(RunError):
    """Another rank has died or hangs: this one must end too, and all are restarted."""


class GivenUp(LeaseLost):
    """Another rank abandoned the batch, or ends."""


class Peers(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in float64."""

    def highest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""

    def first(self, message: bytes) -> bytes:
        """Return the message of rank 0; the others' messages are ignored."""

    def everyone(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order. For small messages: every rank gets all of them."""

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        """Send `messages[r]` to rank r; return each rank's message for this one."""

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place."""

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if one of them calls this with an error: that error there, GivenUp or Stopped elsewhere.

        The only exception to "the same methods": a rank may call this with an error at any time, and the others raise
        at their next call of any method.
        """


class Alone:
    """The peers of a single rank."""

    rank = 0
    size = 1

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def highest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def first(self, message: bytes) -> bytes:
        return message

    def everyone(self, message: bytes) -> list[bytes]:
        return [message]

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        return [bytes(messages[0])]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error


def share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a rank and the row after its last, cut as `torch.chunk` does; the last ranks may have
    none."""
    size = -(-rows // ranks)
    start = min(rank * size, rows)
    return start, min(start + size, rows)
