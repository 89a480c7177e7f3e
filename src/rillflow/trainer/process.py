"""What every process that trains does: torch as the recipe wants it, and an orderly end when it is asked for."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

log = logging.getLogger(__name__)


def prepare_torch(seed: int, threads: int, *, deterministic: bool) -> None:
    """`threads` 0 leaves torch's default."""
    torch.manual_seed(seed)
    if threads:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def stops_on_signal(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for an orderly end: the step in progress is given up, a checkpoint is written."""

    def ask(number: int, frame: FrameType | None) -> None:
        log.info("signal %d: stopping", number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread's owner
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
