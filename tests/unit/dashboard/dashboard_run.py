"""A run folder as a run leaves it, with something for every panel, written by the code that writes it in a run."""

from __future__ import annotations

import atexit
import itertools
import json
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import load_recipe
from rillflow.contracts import SystemClock
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.rules import Rules
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import Span

STARTED = 1_000_000.0


def make_run(parent: Path, recipe: str = "quickstart", *, steps: int = 5, state: str = "finished") -> RunFolder:
    """A copy of a run that is made once, with a token of its own."""
    made = _made(recipe, steps, state)
    names = (f"{made.name}-{n}" if n > 1 else made.name for n in itertools.count(1))
    root = next(parent / name for name in names if not (parent / name).exists())
    shutil.copytree(made, root)
    run = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**run, "token": secrets.token_urlsafe(32)}))
    return RunFolder.open(root)


@cache
def _made(recipe: str, steps: int, state: str) -> Path:
    parent = Path(tempfile.mkdtemp(prefix="dashboard-run-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = RunFolder.create(load_recipe(recipe), parent, now=STARTED)
    write_lines(
        folder, [step_line(number, policy) for number in range(1, steps + 1) for policy in folder.recipe.policies]
    )
    write_lines(
        folder, [{"event": "evaluation", "step": 0, "version": 0, "reward": 0.25, "by_source": {}, "time": STARTED}]
    )
    write_spans(folder, "rollout-0", [("idle", 0.0, 1.0), ("rollout", 1.0, 3.0), ("load", 3.0, 4.0)])
    write_spans(folder, "trainer-agent", [("train", 2.0, 4.0)])
    fill_ledger(folder)
    folder.log("rollout-0").write_text(
        "2026-01-01 10:00:00,000 INFO a: one\n2026-01-01 10:00:01,000 ERROR b: two\n"
        "Traceback (most recent call last):\nValueError: bad\n2026-01-01 10:00:02,000 WARNING c: three\n"
    )
    if state:
        (folder.root / "state.json").write_text(json.dumps({"state": state, "reason": "done", "time": STARTED + 90}))
    return folder.root


def step_line(number: int, policy: str = "agent", **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "step": number, "version": number, "time": STARTED + 10 * number, "reward": number / 10,
        "loss": 0.5 / number, "entropy": 1.0, "response_length": 12.0, "wait_fraction": 0.5, "samples_per_second": 4.0,
        "staleness_mean": 1.0, "staleness_max": 2, "counters": {"trained": number}, **more,
    }  # fmt: skip


def write_lines(folder: RunFolder, lines: list[dict[str, Any]]) -> None:
    with open(folder.metrics, "ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def write_spans(folder: RunFolder, worker: str, spans: list[tuple[str, float, float]]) -> None:
    path = folder.root / "timeline" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        for state, begin, end in spans:
            file.write(msgspec.json.encode(Span(state, STARTED + begin, STARTED + end)) + b"\n")


def fill_ledger(folder: RunFolder) -> None:
    recipe = folder.recipe
    db = Database(folder.ledger)
    balances = Balances(Base(db, Rules.of(recipe), SystemClock()), recipe.policy, recipe.dataflow.balance_every)
    with db.change():
        db.set_meta("format", FORMAT)
        balances.open()
        for name, n in {"cursor": 20, "skipped": 2, "admitted.train": 18, "samples.entered": 60}.items():
            db.count(name, n)
        db.count("failures.timeout", 3)
        for end in (
            ("train", "trained", "", 12),
            ("train", "filtered", "zero_variance", 5),
            ("train", "playing", "", 1),
        ):
            db.run("INSERT INTO tally VALUES (?, ?, ?, ?)", end)
        db.run("INSERT INTO share_tally VALUES (?, 'trained', '', 12)", (recipe.policy,))
        db.run("INSERT INTO user_errors VALUES ('workflow_error', 'flow.py:3', 'ValueError: bad', 'Traceback…', 3)")
        for name, completed, failed, rate in (("rollout-0", 40, 0, 4.0), ("rollout-1", 4, 6, 0.5)):
            db.run(
                "INSERT INTO nodes (name, incarnation, state, seen, completed, failed, rate, capacity, pace, produced, "
                "accepted, consumed, leased, stats) VALUES (?, 'i', 'healthy', ?, ?, ?, ?, 8, 1.5, 50, 44, 30, 60, ?)",
                (name, STARTED, completed, failed, rate, json.dumps({"agent.pull_bytes": 5e6, "agent.loads": 3.0})),
            )
    db.commit()
    db.close()
