"""Arms of a learning experiment: runs of the user's commands, several at once, and their held-out rewards.

Each run has a folder of its own under one folder. A run that is finished is not made again, so an experiment that was
cut short goes on where it was.
"""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Semaphore
from typing import TypeVar

LIMIT = 1500  # seconds of one command
_NORMAL_95 = 1.96
_EPISODES = "SELECT count(*) FROM tasks WHERE lane = 'train' AND state = 'done'"
_ROUNDS = "SELECT id FROM rounds WHERE state = 'ended' ORDER BY id"
_OF_PROMPTS = (
    "SELECT avg(t.reward) FROM tasks t JOIN groups g ON g.id = t.grp "
    "WHERE t.lane = 'eval' AND t.round = ? AND t.state = 'done' GROUP BY g.prompt"
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


class Runs:
    """The runs of an experiment under `folder`, at most `jobs` commands at once. Any thread may ask for one."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self._jobs = Semaphore(jobs)
        self._guard = Lock()
        self._locks: dict[str, Lock] = {}

    def made(self, part: str, *command: str) -> Path:
        """Return the run folder of a part; the command is run now unless it has been run to its end before."""
        with self._guard:
            lock = self._locks.setdefault(part, Lock())
        with lock:
            runs = self.folder / part
            if not (done := _finished(runs)):
                self.rillflow(*command, "--runs", str(runs))
                done = _finished(runs)
            return done[-1]

    def rillflow(self, *command: str) -> None:
        with self._jobs:
            print("rillflow", *command, file=sys.stderr, flush=True)
            words = [sys.executable, "-m", "rillflow", *command]
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise RuntimeError(f"rillflow {' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def at_once(work: Sequence[Callable[[], Made]]) -> list[Made]:
    """Return what the functions return, each called in a thread of its own."""
    with ThreadPoolExecutor(max(len(work), 1)) as pool:
        return [done.result() for done in [pool.submit(one) for one in work]]


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


def metric(run: Path, name: str) -> list[float]:
    """Return the values of a metric of a run's steps, in their order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(line[name]) for line in lines if name in line]


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
