"""Arms of a learning experiment: runs of the user's commands, several at once, and their held-out rewards.

Each run has a folder of its own under one folder. A run that is finished is not made again, so an experiment that its
time limit has cut short goes on where it was when it is started again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Semaphore
from typing import TypeVar

LIMIT = 1500  # seconds of one command
_STOPPING = 20  # seconds that a command gets to stop
_NORMAL_95 = 1.96
_EPISODES = "SELECT count(*) FROM tasks t JOIN groups g ON g.id = t.grp WHERE g.lane = 'train' AND t.state = 'done'"
_ROUNDS = "SELECT id FROM rounds WHERE state = 'ended' ORDER BY id"
_OF_PROMPTS = (
    "SELECT avg(t.reward) FROM tasks t JOIN groups g ON g.id = t.grp "
    "WHERE g.lane = 'eval' AND g.round = ? AND t.state = 'done' GROUP BY g.prompt"
)

Made = TypeVar("Made")


@dataclass(frozen=True)
class Mean:
    """A mean and half of its 95 % interval."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), _NORMAL_95 * spread / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


class NotMade(Exception):
    """The time is up and a run is not finished."""


class Runs:
    """The runs of an experiment under `folder`, at most `jobs` commands at once, for so many `seconds`: then running
    commands are stopped, and what is not there yet raises NotMade. Any thread may ask for a run."""

    def __init__(self, folder: Path, jobs: int, seconds: float = math.inf) -> None:
        self.folder = folder
        self._end = time.monotonic() + seconds
        self._jobs = Semaphore(jobs)
        self._guard = Lock()
        self._locks: dict[str, Lock] = {}

    def made(self, part: str, *command: str) -> Path:
        """Return the run folder of a part; the command is run now unless it has been run to its end before."""
        with self._lock(part):
            runs = self.folder / part
            if not (done := _finished(runs)):
                self._rillflow(*command, "--runs", str(runs))
                done = _finished(runs)
            return done[-1]

    def written(self, part: str, *command: str) -> Path:
        """Return the path of a part that a command writes; `{}` stands for it. The command is run once."""
        path = self.folder / part
        with self._lock(part):
            if not path.exists():
                self._rillflow(*(word.replace("{}", str(path)) for word in command))
            return path

    def exported(self, run: Path) -> Path:
        """Return the model folder of a run's first policy, as it was when the run ended."""
        return self.written(f"{run.parent.name}-model", "export", str(run), "{}")

    def _lock(self, part: str) -> Lock:
        with self._guard:
            return self._locks.setdefault(part, Lock())

    def _rillflow(self, *command: str) -> None:
        # Tiny policies play and learn faster on the CPU; a fit takes the GPU if there is one.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if command[0] == "run" else {}
        words = [sys.executable, "-m", "rillflow", *command]
        with self._jobs, tempfile.TemporaryFile("w+") as said:
            begun = time.monotonic()
            if begun >= self._end:
                raise NotMade(" ".join(command))
            process = subprocess.Popen(words, stdout=said, stderr=said, env={**os.environ, **hidden})
            try:
                code = process.wait(min(LIMIT, self._end - begun))
            except subprocess.TimeoutExpired:
                _stop(process)
                raise NotMade(" ".join(command)) from None
            print(f"{time.monotonic() - begun:.0f} s: rillflow", *command, file=sys.stderr, flush=True)
            if code:
                said.seek(0)
                raise RuntimeError(f"rillflow {' '.join(command)} failed:\n{said.read()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let a run stop its processes, as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def at_once(work: Sequence[Callable[[], Made]]) -> list[Made | None]:
    """Return what the functions return, each called in a thread of its own; None for what is NotMade."""

    def made(one: Callable[[], Made]) -> Made | None:
        try:
            return one()
        except NotMade:
            return None

    with ThreadPoolExecutor(max(len(work), 1)) as pool:
        return list(pool.map(made, work))


def held_out(run: Path) -> tuple[Mean, Mean]:
    """Return a run's held-out reward before and after training. Intervals are over prompts."""
    with closing(_ledger(run)) as ledger:
        rounds = [number for (number,) in ledger.execute(_ROUNDS)]
        of_ends = [ledger.execute(_OF_PROMPTS, (number,)).fetchall() for number in (rounds[0], rounds[-1])]
    before, after = ([reward for (reward,) in rows] for rows in of_ends)
    return Mean.of(before), Mean.of(after)


def episodes(run: Path) -> int:
    """Return the number of training episodes that a run has played."""
    with closing(_ledger(run)) as ledger:
        (count,) = ledger.execute(_EPISODES).fetchone()
    return int(count)


def asked(run: Path, query: str, *values: object) -> list[tuple[float, ...]]:
    """Return the rows of a query to a run's ledger."""
    with closing(_ledger(run)) as ledger:
        return ledger.execute(query, values).fetchall()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ledger(run: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)


def _finished(runs: Path) -> list[Path]:
    states = {run: run / "state.json" for run in sorted(runs.glob("*-*"))}
    return [
        run
        for run, state in states.items()
        if state.is_file() and json.loads(state.read_text()).get("state") == "finished"
    ]
