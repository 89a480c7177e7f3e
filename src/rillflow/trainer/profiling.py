"""torch's profiler around chosen optimizer steps (`trainer.profile`), written as a Chrome trace for each rank.

A profile that cannot be written is reported and never ends a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps `first` to `last`, counted from 1; what it saw is in one file at `path` afterwards."""

    def __init__(self, first: int, last: int, path: Path) -> None:
        self._first, self._last = first, last
        self._path = path
        self._profile: profile | None = None

    @classmethod
    def of(cls, steps: str | None, folder: Path, rank: int) -> StepProfiler | None:
        """`steps` as in a recipe: `3` or `3-5`."""
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
        """Stop, if it has begun, and write what there is."""
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
            log.warning("no profile: %s", error)
        else:
            log.info("profile of steps %d to %d in %s", self._first, self._last, self._path)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
