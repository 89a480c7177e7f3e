"""Work that goes on while the next step computes: one piece at a time, and memory on the host for what it writes.

Invariants: there is at most one piece under way; what it raises comes out at the next `check` or `settle`, once; a wait
for it has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from rillflow.errors import DeadlineExceeded
from rillflow.weights.codec import unique

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

DEADLINE = 1800.0
_LAST_WAIT = 60.0


class Background:
    """A thread for each piece of work. It ends with the process, whatever it is at: what it writes must bear that."""

    def __init__(self, what: str, deadline: float = DEADLINE) -> None:
        self._what = what
        self._deadline = deadline
        self._work: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def start(self, job: Callable[[], None]) -> None:
        self.settle()
        work: Future[None] = Future()
        self._work = work

        def run() -> None:
            try:
                job()
            except BaseException as error:  # to be raised where somebody can do something about it
                work.set_exception(error)
            else:
                work.set_result(None)

        threading.Thread(target=run, name=self._what, daemon=True).start()

    def check(self) -> None:
        """Raise what has gone wrong since."""
        if not self.busy:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way; raise what has gone wrong."""
        work = self._work
        if work is None:
            return
        try:
            work.result(self._deadline)
        except TimeoutError as error:
            if work.done():
                self._work = None
                raise
            raise DeadlineExceeded(
                f"{self._what} has not ended within {self._deadline:.0f} s",
                "the disk is too slow or hangs: check it, and start again: nothing that was acknowledged is lost",
            ) from error
        except BaseException:
            self._work = None
            raise
        self._work = None

    def close(self) -> None:
        """For who ends because of something else: leave nothing half done if a moment's wait can help it."""
        work, self._work = self._work, None
        if work is not None:
            with suppress(TimeoutError):
                if (error := work.exception(_LAST_WAIT)) is not None:
                    log.error("%s failed: %s", self._what, error)


class HostCopy:
    """A copy of tensors in the host's memory, or where they are if they are to `stay` there; the next copy reuses its
    memory. Tied tensors stay tied."""

    def __init__(self, *, stay: bool = False) -> None:
        self._stay = stay
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Good until the next one is taken."""
        kept, aliases = unique(tensors)
        self._memory = {name: self._room(name, tensor) for name, tensor in kept.items()}
        for name, tensor in kept.items():
            self._memory[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in kept.values()):
            torch.cuda.synchronize()
        return self._memory | {alias: self._memory[name] for alias, name in aliases.items()}

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned where it is filled from a GPU, which is then several times faster."""
        known = self._memory.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        if self._stay:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
