"""kill -9 of the trainer at every moment of a step, of a checkpoint and of a publication, in one run.

The short form kills it once at each moment, the long one ten times in each of the three.

Training goes on every time; at the end the audit balances and weights and ledger agree.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from commands import Cli, wait_until
from forked_command import fork_python
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder
from rillflow.weights import FolderStore
from soak import SOAK, repetitions

STEPS = repetitions(20, 80)
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "trainer.micro_tokens=400",
    "trainer.checkpoint_every=2",
    "dataflow.group_size=4",
    "dataflow.staleness=4",
    "evaluation.every=0",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
    "runtime.threads=1",
    "policies.agent.weights={mode: delta, snapshot_every: 4}",
]
MOMENTS = {
    "step": ["computing", "updated", "committed"],
    "checkpoint": ["half written", "all but visible", "visible", "cleaning up"],
    "publish": ["half written", "all but visible", "visible", "head moved", "cleaning up"],
}
# How often a life comes to its moment before it dies there. Some must get on: there is a checkpoint every second step.
TIMES = {"step": (1, 3), "checkpoint": (1, 2), "publish": (1, 3)}


def plan(seed: int) -> list[tuple[str, int]]:
    """Return the deaths in their order: each has its moment and how often a life comes to it before it dies."""
    rng = random.Random(seed)
    deaths = []
    for what, moments in MOMENTS.items():
        for number in range(10 if SOAK else len(moments)):
            moment = f"{what}: {moments[number % len(moments)]}"
            deaths.append((moment, rng.randint(*TIMES[what])))
    rng.shuffle(deaths)
    return deaths


@pytest.fixture
def folder(cli: Cli) -> Iterator[RunFolder]:
    """A run whose parts are started by hand, all but the trainer."""
    run = RunFolder.create(load_recipe("stockroom", RUN), cli.cwd / "runs")
    started = [cli.start("dataflow", str(run.root))]
    wait_until(lambda: run.endpoint("dataflow") is not None, "the dataflow service")
    started += [cli.start("unit", str(run.root)), cli.start("rollout", str(run.root))]
    yield run
    for part in started:
        part.process.send_signal(signal.SIGTERM)
    for part in started:
        part.wait(120)


@pytest.mark.chaos
@pytest.mark.soak
def test_deaths_of_a_trainer_at_every_moment(cli: Cli, folder: RunFolder) -> None:
    deaths = plan(5)
    script = Path(__file__).with_name("killed_trainer.py")
    told = cli.cwd / "lives.jsonl"
    words = [str(script), str(folder.root), json.dumps(deaths)]
    code = fork_python(cli.warm.path(), words, os.environ, told).wait(800)
    log = folder.log("trainer-agent").read_text()[-3000:]
    assert code == 0, f"{told.read_text()}\n{log}"
    lives = [json.loads(line) for line in told.read_text().splitlines()]
    assert [life["code"] for life in lives] == [-signal.SIGKILL] * len(deaths) + [0], f"{lives}\n{log}"
    assert Counter(life["moment"] for life in lives[:-1]) == Counter(moment for moment, _ in deaths)
    wait_until(lambda: phase(folder) == "ended", "the end of the run", 600)
    check_agreement(folder)
    audited = json.loads(cli.run("audit", str(folder.root), "--json").output())
    assert audited["balanced"], audited


def check_agreement(folder: RunFolder) -> None:
    """Store and ledger stand at the same version; no number was ever used twice; every step was made once."""
    line = FolderStore(folder.weights("agent")).line()
    with closing(sqlite3.connect(f"file:{folder.ledger}?mode=ro", uri=True)) as ledger:
        version, steps = ledger.execute("SELECT version, steps FROM policies WHERE name = 'agent'").fetchone()
        live = [row[0] for row in ledger.execute("SELECT version FROM steps WHERE state = 'live' ORDER BY version")]
    assert (line.head, steps, len(live)) == (version, STEPS, STEPS)
    assert not line.orphaned & set(live)
    lines = [json.loads(text) for text in folder.metrics.read_text().splitlines()]
    committed = [line["version"] for line in lines if "event" not in line]
    assert len(committed) == len(set(committed)), "a version was committed twice"
    assert len(committed) > STEPS, "nothing was ever rolled back"


def phase(folder: RunFolder) -> str:
    with closing(sqlite3.connect(f"file:{folder.ledger}?mode=ro", uri=True)) as ledger:
        return str(json.loads(ledger.execute("SELECT value FROM meta WHERE key = 'phase'").fetchone()[0]))
