"""Writes the episodes that a run keeps for people, beside the service's event loop.

Nothing waits for it: a step is acknowledged before its trajectories are read, at most `MOST_WAITING` lists of episodes
wait to be written, and what comes beyond them is dropped and counted. A disk or a storage unit that refuses costs the
trajectories that it refused, never the run; it is logged once, and shown in the status for as long as it lasts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter

from rillflow.clients.payloads import Arrays, DamagedRows, PayloadReader
from rillflow.dataflow.kept_episodes import KeptEpisode, KeptSample
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.errors import CorruptData, RillflowError
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import Floats, TokenPath, Trajectory, TrajectoryInfo, decode_body, described
from rillflow.types import CommitBatch, FailTask, KeptTokens, Row, Units

log = logging.getLogger(__name__)

MOST_WAITING = 64
READ_DEADLINE = 10.0  # seconds in which a unit has said what an episode left
CLOSE_DEADLINE = 5.0  # seconds that what waits may take at the service's end
_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions", "transcript")
_TOKENS = _COLUMNS[:-1]


class TrajectoryKeeper:
    """Keeps trajectories of one ledger's run in the file at `path`."""

    def __init__(
        self, ledger: Ledger, path: Path, bounds: Bounds, token: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._ledger = ledger
        self._path = path
        self._bounds = bounds
        self._store: TrajectoryStore | None = None
        self._reader = PayloadReader(self._units, token, deadline=READ_DEADLINE)
        self._waiting: asyncio.Queue[list[KeptEpisode]] = asyncio.Queue(MOST_WAITING)
        self._writer: asyncio.Task[None] | None = None
        self._round = max(ledger.kept.ended_rounds(-1), default=-1)
        self._trouble = ""
        self._counted = Counter(
            "rillflow_trajectories", "Trajectories by what became of them", ["result"], registry=registry
        )

    async def _units(self) -> Units:
        return self._ledger.units()

    # ------------------------------------------------------------ what is heard

    def committed(self, news: CommitBatch) -> None:
        """Keep what was chosen of a step that was just committed."""
        self._take(lambda: self._ledger.kept.of_step(news))

    def failed(self, news: FailTask) -> None:
        """Keep a failed episode, if its node has sent what it left."""
        if news.trajectory:
            self._take(lambda: [found for found in [self._ledger.kept.of_failure(news)] if found is not None])

    def look(self) -> None:
        """Keep what was chosen of the evaluations that have ended since the last look."""
        for number in self._ledger.kept.ended_rounds(self._round):
            self._round = number
            self._take(partial(self._ledger.kept.of_round, number))

    def note(self) -> dict[str, str]:
        """Return what the status says while trajectories cannot be kept."""
        return {"trajectories": f"episodes are not kept: {self._trouble}"} if self._trouble else {}

    def _take(self, choose: Callable[[], list[KeptEpisode]]) -> None:
        try:
            episodes = choose()
        except RillflowError as error:  # such as prompts that have changed: the run itself will tell
            log.warning("episodes that were chosen are not kept: %s", error.message)
            return
        if not episodes:
            return
        try:
            self._waiting.put_nowait(episodes)
        except asyncio.QueueFull:
            self._count("dropped", len(episodes))
            return
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="dataflow-trajectories")

    async def close(self) -> None:
        """Write what waits, as far as that takes no longer than its deadline."""
        self.look()
        if self._writer is not None:
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(CLOSE_DEADLINE):
                    await self._writer
        await self._reader.close()
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------ writing

    async def _write_all(self) -> None:
        while not self._waiting.empty():
            for episode in self._waiting.get_nowait():
                try:
                    result = await self._keep(episode)
                except RillflowError as error:
                    result = "refused" if not isinstance(error, _Unread) else "unread"
                    self._tell(error)
                except Exception:
                    log.exception("trajectory %s is not kept", episode.id)
                    result = "refused"
                else:
                    self._trouble = ""
                self._count(result, 1)

    def _count(self, result: str, by: int) -> None:
        self._counted.labels(result).inc(by)

    def _tell(self, error: RillflowError) -> None:
        if not self._trouble:
            log.warning("trajectories are not kept for now: %s", error)
        self._trouble = error.message

    async def _keep(self, episode: KeptEpisode) -> str:
        """Return "kept", or "no room" where the bounds leave no place for it."""
        rows = await self._read(episode.samples) if episode.samples else []
        return "kept" if await asyncio.to_thread(self._write, episode, rows) else "no room"

    async def _read(self, samples: Sequence[KeptSample]) -> list[Arrays]:
        """Return the columns of each sample; none of one that is gone."""
        rows = [sample.row for sample in samples]
        gone: set[Row] = set()
        while len(gone) < len(rows):
            left = [row for row in rows if row not in gone]
            try:
                found = dict(zip(left, await self._reader.read(left, _COLUMNS), strict=True))
            except DamagedRows as error:
                gone.update(error.rows)
            except RillflowError as error:
                raise _Unread(error.message, error.hint) from error
            else:
                return [found.get(row, {}) for row in rows]
        raise _Unread("its rows are gone from the storage units")

    def _write(self, episode: KeptEpisode, rows: Sequence[Arrays]) -> bool:
        if self._store is None:
            self._store = TrajectoryStore(self._path, self._bounds)
        if episode.kept == "failure":
            return self._store.add(of_failure(episode))
        before = self._store.get(episode.id)
        return self._store.add(of_samples(episode, rows, [] if before is None else before.samples))


class _Unread(RillflowError):
    """No storage unit has said what the episode left."""


# ------------------------------------------------------------ from what was read


def of_failure(episode: KeptEpisode) -> Trajectory:
    """Return the trajectory of a failed episode from what its node has sent."""
    unknown = TrajectoryInfo(id=episode.id, time=episode.time, lane="train", status="failed", kept="failure")
    sent = decode_body(unknown, episode.body)
    return replace(
        sent, info=described(sent.samples, **_known(episode), status="failed"), payload=episode.prompt.payload
    )


def of_samples(episode: KeptEpisode, rows: Sequence[Arrays], before: Sequence[TokenPath] = ()) -> Trajectory:
    """Return the trajectory of an episode from the rows of its samples; `before` is what was kept of them already."""
    written = next((row["transcript"].tobytes() for row in rows if "transcript" in row), b"[]")
    paths: list[dict[str, Any]] = json.loads(written)
    numbers = _path_numbers(paths, episode.samples)
    samples = [
        _filled(_token_path(sample, row, paths, number), before)
        for sample, row, number in zip(episode.samples, rows, numbers, strict=True)
        if all(name in row for name in _TOKENS)
    ]
    return Trajectory(
        info=described(samples, **_known(episode), status="done"),
        payload=episode.prompt.payload,
        paths=paths,
        rewards=episode.metrics,
        samples=samples,
    )


def _known(episode: KeptEpisode) -> dict[str, Any]:
    """Return the fields of a trajectory's info that its samples do not tell."""
    return {
        "id": episode.id,
        "time": episode.time,
        "lane": "evaluation" if episode.lane == "eval" else "train",
        "cause": episode.cause,
        "kept": episode.kept,
        "step": episode.step,
        "prompt": episode.prompt.id,
        "source": episode.prompt.source,
        "group": episode.group,
        "place": episode.place,
        "reward": episode.reward,
        "calls": episode.calls,
        "seconds": episode.seconds,
        "node": episode.node,
    }


def _path_numbers(paths: Sequence[dict[str, Any]], samples: Sequence[KeptSample]) -> list[int | None]:
    """Return the number of each sample's path: a policy's samples are in the order of its paths, without those of
    agents that are not trained."""
    numbers: list[int | None] = [None] * len(samples)
    for policy in {sample.policy for sample in samples}:
        own = [n for n, sample in enumerate(samples) if sample.policy == policy]
        found = [n for n, path in enumerate(paths) if path["policy"] == policy]
        if len(found) > len(own):
            trained = {samples[n].agent for n in own}
            found = [n for n in found if paths[n].get("agent", "") in trained]
        if len(found) == len(own):
            for sample, path in zip(own, found, strict=True):
                numbers[sample] = path
    return numbers


def _token_path(sample: KeptSample, row: Arrays, paths: Sequence[dict[str, Any]], number: int | None) -> TokenPath:
    advantages, logprobs = _told(sample.told, len(row["tokens"]))
    return TokenPath(
        policy=sample.policy,
        role=sample.agent,
        reward=sample.reward,
        fork=str(paths[number].get("fork", "")) if number is not None else "",
        truncated=sample.truncated,
        path=number,
        tokens=row["tokens"],
        mask=row["mask"],
        logprobs=np.where(row["temperatures"] > 0, row["logprobs"], row["raw_logprobs"]),
        versions=row["versions"],
        advantages=advantages,
        trainer_logprobs=logprobs,
    )


def _told(told: KeptTokens | None, length: int) -> tuple[Floats | None, Floats | None]:
    """Return the trainer's values for each token, NaN where it reported none."""
    if told is None:
        return None, None
    at = np.frombuffer(told.at, "<i4")
    columns = [np.frombuffer(data, "<f4") for data in (told.advantages, told.logprobs)]
    if any(len(column) != len(at) for column in columns) or (len(at) and not 0 <= at.min() <= at.max() < length):
        raise CorruptData("what the trainer told of a sample does not fit its tokens", "check the trainer's version")
    spread = [np.full(length, np.nan, np.float32) for _ in columns]
    for values, column in zip(spread, columns, strict=True):
        values[at] = column
    return spread[0], spread[1]


def _filled(sample: TokenPath, before: Sequence[TokenPath]) -> TokenPath:
    """Return it with the values of another policy's trainer for the tokens without a value."""
    for same in before if sample.advantages is None else ():
        if same.policy == sample.policy and np.array_equal(same.tokens, sample.tokens):
            return replace(sample, advantages=same.advantages, trainer_logprobs=same.trainer_logprobs)
    return sample
