"""A training process: torch's settings, an orderly end on signals, and torch's profiler around chosen steps.

A profile (`trainer.profile`) is a Chrome trace for each rank. If it cannot be written, the log says so and the run goes
on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)


def prepare_torch(seed: int, threads: int, *, deterministic: bool) -> None:
    """Set torch's seed, threads and deterministic mode; `threads` 0 leaves torch's default."""
    torch.manual_seed(seed)
    if threads:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def stops_on_signal(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM and SIGINT: the trainer then abandons its step and writes a checkpoint."""

    def ask(number: int, frame: FrameType | None) -> None:
        log.info("signal %d: stopping", number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- the profiler


class StepProfiler:
    """Profiles the steps `first` to `last`, counted from 1, and writes one file at `path`."""

    def __init__(self, first: int, last: int, path: Path) -> None:
        self._first, self._last = first, last
        self._path = path
        self._profile: profile | None = None

    @classmethod
    def of(cls, steps: str | None, folder: Path, rank: int) -> StepProfiler | None:
        """Parse `steps` as in a recipe: `3` or `3-5`."""
        if steps is None:
            return None
        first, _, last = steps.partition("-")
        return cls(int(first), int(last or first), folder / f"steps-{steps}.rank-{rank}.json")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if not self._first <= step <= self._last:
            yield
            return
        if self._profile is None:
            self._profile = profile(activities=_activities(), record_shapes=True)
            self._profile.start()
        with record_function(f"optimizer step {step}"):
            yield
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Stop a profile that has begun and write it."""
        if self._profile is None:
            return
        made, self._profile = self._profile, None
        made.stop()
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made.export_chrome_trace(str(part))
            os.replace(part, self._path)
        except (OSError, RuntimeError) as error:
            log.warning("the profile was not written: %s", error)
        else:
            log.info("profile of steps %d to %d in %s", self._first, self._last, self._path)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
