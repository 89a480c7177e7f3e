"""Writing in the background while the next step computes, and the host memory for it.

Ranks that write into one folder report to rank 0 by small files in it (`hand_in`, `collect`). They do not use the
network: background threads must not take part in the collectives of the threads that train.

Invariants: at most one piece of work runs; its error is raised once, at the next `check` or `settle`; a wait for it has
a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from rillflow.errors import DeadlineExceeded, StorageError
from rillflow.storage import write_atomic
from rillflow.types.base import json_decoder
from rillflow.weights.codec import unique

if TYPE_CHECKING:
    from rillflow.contracts import Tensors


log = logging.getLogger(__name__)


DEADLINE = 1800.0
_LAST_WAIT = 60.0


class Background:
    """A thread for each piece of work. It ends with the process at any moment, so its writes must be safe then."""

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
            except BaseException as error:  # raised again in the thread that trains
                work.set_exception(error)
            else:
                work.set_result(None)

        threading.Thread(target=run, name=self._what, daemon=True).start()

    def check(self) -> None:
        """Raise the error of the work, if it has ended with one."""
        if not self.busy:
            self.settle()

    def settle(self) -> None:
        """Wait until the work has ended; raise its error, if any."""
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
                "the disk is slow or hangs: check it and start again; nothing that was acknowledged is lost",
            ) from error
        except BaseException:
            self._work = None
            raise
        self._work = None

    def close(self) -> None:
        """End after an error elsewhere: wait for the work for a moment and log its error."""
        work, self._work = self._work, None
        if work is not None:
            with suppress(TimeoutError):
                if (error := work.exception(_LAST_WAIT)) is not None:
                    log.error("%s failed: %s", self._what, error)


class BackgroundWriter:
    """A base for classes that write in the background, one piece of work at a time."""

    def __init__(self, what: str, deadline: float = DEADLINE) -> None:
        self._background = Background(what, deadline)

    def check(self) -> None:
        """Raise the error of the writing, if it has ended with one."""
        self._background.check()

    def finish(self) -> None:
        """Wait until the last piece is durable; raise its error, if any."""
        self._background.settle()

    def close(self) -> None:
        """End after an error elsewhere: wait for the writing for a moment."""
        self._background.close()


class HostCopy:
    """A copy of tensors in host memory, or with `stay` on their own device. The next copy reuses the memory. Tied
    tensors stay tied."""

    def __init__(self, *, stay: bool = False) -> None:
        self._stay = stay
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, tensors: Tensors, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the copies, in `dtype` if it is given, which are valid until the next call."""
        kept, aliases = unique(tensors)
        self._memory = {name: self._room(name, tensor, dtype or tensor.dtype) for name, tensor in kept.items()}
        for name, tensor in kept.items():
            self._memory[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in kept.values()):
            torch.cuda.synchronize()
        return self._memory | {alias: self._memory[name] for alias, name in aliases.items()}

    def _room(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor. It is pinned for copies from a GPU, which are then several times faster."""
        known = self._memory.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == dtype:
            return known
        if self._stay:
            return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


# ---------------------------------------------------------------- reports of ranks that write into one folder


S = TypeVar("S", bound=msgspec.Struct)

_POLL = 0.05  # seconds


def hand_in(folder: Path, rank: int, news: msgspec.Struct) -> None:
    """Write a rank's report, once everything in it is durable."""
    write_atomic(_path(folder, rank), msgspec.json.encode(news))


def collect(folder: Path, rank: int, kind: type[S], patience: float) -> S:
    """Wait for a rank's report and return it; StorageError after `patience` seconds."""
    path, deadline = _path(folder, rank), time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            raise StorageError(
                f"rank {rank} has not written its part of {folder} within {patience:.0f} s",
                "all ranks must see the same run folder; read that rank's log",
            )
        time.sleep(_POLL)
    news = json_decoder(kind).decode(path.read_bytes())
    path.unlink()
    return news


def _path(folder: Path, rank: int) -> Path:
    return folder / f".rank{rank:05d}.json"
