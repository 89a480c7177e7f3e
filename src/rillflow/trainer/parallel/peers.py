"""What the ranks of a trainer say to each other. All of them call the same methods in the same order.

Invariant: every rank gets the same answer, bit for bit, so that no two of them ever decide differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rillflow.errors import LeaseLost, RunError

if TYPE_CHECKING:
    import torch


class Stopped(Exception):
    """Somebody asked the trainer to end: the step in progress is given up."""


class RunOver(Stopped):
    """The run has ended before the batch was complete: there is nothing left to do."""


class PeerLost(RunError):
    """Another rank has gone or hangs: this one can only end, and all are started anew."""


class GivenUp(LeaseLost):
    """Another rank has given the batch up, or ends."""


class Peers(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each value, in float64."""

    def highest(self, values: Sequence[float]) -> list[float]:
        """The maximum over all ranks of each value."""

    def first(self, message: bytes) -> bytes:
        """What rank 0 says; what the others say is not heard."""

    def everyone(self, message: bytes) -> list[bytes]:
        """What each rank says, in their order. For small things: every rank gets all of it."""

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        """`messages[r]` goes to rank r; the answer holds what each rank had for this one."""

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor becomes its sum over all ranks, in place."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when one of them comes here with an error: that error there, GivenUp or Stopped
        elsewhere.

        The one exception to "the same methods": a rank with an error meets the others wherever they are, and they
        raise at their next call of any method.
        """


class Alone:
    """One rank, which has nobody to ask."""

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
