"""The records and the kept episodes of an evaluation.

Records: one JSON line with a checksum for every answer, written as the answer ends. A line counts whole or not at all
(a sample whose line was torn by a kill is played again); of several lines of one question and sample the first with a
reward counts. A second run over the same file adds the missing samples and changes nothing.

Kept episodes are for people, in the same kind of file as a run's. A thread writes one episode at a time. A disk error
costs episodes, never the evaluation, and is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from rillflow.config import Recipe
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DataError, StorageError
from rillflow.evaluate.playing import NAME, Ended
from rillflow.rollout.push import trajectory_of
from rillflow.storage import disk_errors
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, Trajectory
from rillflow.types import Task
from rillflow.types.base import json_decoder

_MARK = b',"check":"'
_END = b'"}\n'


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of one question. Without a reward, `cause` and `error` say why.

    `vote` is what the answer amounts to where answers are compared; `digest` is of all tokens that were sampled.
    """

    id: str
    sample: int
    seed: int
    reward: float | None = None
    cause: str = ""
    error: str = ""
    answer: str | None = None
    vote: str | None = None
    tokens: int = 0
    cut: bool = False
    calls: int = 0
    seconds: float = 0.0
    digest: str = ""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.sample)


class RecordFile:
    """The records of one benchmark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, int], Record] = {}
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab+")  # noqa: SIM115
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for line in self._file:
            record = decode(line)
            if record is None and line.endswith(b"\n"):
                raise DataError(
                    f"{self.path} has a line that was changed: {line[:60]!r}…", "give another --out, or remove the line"
                )
            if record is None:
                break
            whole += len(line)
            self._keep(record)
        self._file.truncate(whole)  # the torn end of a run that was killed

    def _keep(self, record: Record) -> None:
        known = self._known.get(record.key)
        if known is None or (known.reward is None and record.reward is not None):
            self._known[record.key] = record

    def add(self, record: Record) -> None:
        with disk_errors(self.path):
            self._file.write(encode(record))
            self._file.flush()
        self._keep(record)

    def rewarded(self, question: str, sample: int) -> bool:
        known = self._known.get((question, sample))
        return known is not None and known.reward is not None

    def of(self, wanted: Sequence[tuple[str, int]]) -> list[Record]:
        """Return the existing records of these samples."""
        return [self._known[key] for key in wanted if key in self._known]

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


def encode(record: Record) -> bytes:
    text = msgspec.json.encode(record)[:-1]
    return text + _MARK + xxh3_64_hexdigest(text).encode() + _END


def decode(line: bytes) -> Record | None:
    """The record of a line; None where it is not as it was written."""
    text, mark, end = line.rpartition(_MARK)
    if not mark or end != xxh3_64_hexdigest(text).encode() + _END:
        return None
    return json_decoder(Record).decode(text + b"}")


def fingerprint(records: Sequence[Record]) -> str:
    """One word for all that was sampled: equal for two evaluations that gave the same answers."""
    parts = sorted((one.id, one.sample, one.digest) for one in records)
    return xxh3_64_hexdigest(msgspec.json.encode(parts))


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
