"""The episodes of an evaluation that are kept for people, in the same kind of file as a run's.

A thread writes one episode at a time. A disk error costs episodes, never the evaluation, and is logged once.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rillflow.config import Recipe
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import StorageError
from rillflow.evaluate.stage import NAME, Ended
from rillflow.rollout.kept import trajectory_of
from rillflow.storage.trajectories import FILE, Bounds, Trajectory, TrajectoryStore
from rillflow.types import Task

log = logging.getLogger(__name__)

MOST, MOST_FAILED = 10_000, 1_000


class KeptEpisodes:
    """The episodes of one evaluation, in its folder; none where its recipe keeps none."""

    def __init__(self, folder: Path, recipe: Recipe, clock: Clock | None = None) -> None:
        self._path = folder / FILE
        self._bytes = recipe.observe.trajectories.max_bytes
        self._clock = clock or SystemClock()
        self._store: TrajectoryStore | None = None
        self._writing = asyncio.Lock()
        self._told = False

    async def keep(self, suite: str, task: Task, ended: Ended) -> None:
        if not self._bytes:
            return
        error = "\n".join(filter(None, (ended.error, ended.trace)))
        made = trajectory_of(
            ended.record,
            payload=task.prompt.payload,
            rewards=ended.rewards,
            metrics=ended.metrics,
            error=error,
            id=task.id,
            time=self._clock.now(),
            lane="evaluation",
            status="failed" if ended.cause else "done",
            cause=ended.cause,
            kept="failure" if ended.cause else "evaluation",
            prompt=task.prompt.id,
            source=suite,
            group=task.group,
            place=task.place,
            reward=next(iter(ended.rewards.values()), None),
            seconds=ended.seconds,
            node=NAME,
        )
        async with self._writing:
            try:
                await asyncio.to_thread(self._add, made)
            except StorageError as refused:
                if not self._told:
                    log.warning("episodes are not kept for now: %s", refused)
                self._told = True

    def _add(self, made: Trajectory) -> None:
        if self._store is None:
            bounds = Bounds(self._bytes, {"evaluation": MOST, "failure": MOST_FAILED})
            self._store = TrajectoryStore(self._path, bounds)
        self._store.add(made)

    def close(self) -> None:
        """Let go of the file; the next episode opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None
