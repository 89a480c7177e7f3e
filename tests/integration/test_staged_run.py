"""The first steps of the recipe `staged`: its reference worker is killed once, the run learns, and what the worker
wrote is what the trainer would have computed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import Cli, Started, processes_of, steps_of, wait_until
from rillflow.config.load import read_resolved
from rillflow.observe.metrics import read_metrics
from rillflow.storage import SegmentReader
from rillflow.storage.records import Place
from rillflow.storage.spans import read_spans
from rillflow.trainer.batches import TRAINED_COLUMNS, Databuffer, make_rows
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import Roles
from rillflow.types import COLUMNS, BatchSample, Row

pytestmark = pytest.mark.slow
WRITTEN = "reference_N.f4"
SHORT = ("trainer.steps=8", "evaluation.every=0", "evaluation.target=null", "dataflow.task_lease=5")
GAIN = 0.2  # of the held-out reward; eight steps usually gain 0.4


@pytest.fixture(scope="module")
def run(shared_cli: Cli) -> Started:
    run = shared_cli.start("run", "staged", *SHORT)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 1, "a step", 600)
    victim = processes_of(run.folder)["stage"]
    victim.kill()
    wait_until(lambda: processes_of(run.folder).get("stage", victim) != victim, "another worker", 120)
    assert run.wait(900) == 0, run.output()[-4000:]
    return run


def test_it_learns_and_the_audit_balances(run: Started, shared_cli: Cli) -> None:
    before, after = json.loads((run.folder / "summary.json").read_text())["heldout"]
    assert after["reward"] >= before["reward"] + GAIN
    audited = json.loads(shared_cli.run("audit", str(run.folder), "--json").output())
    assert audited["balanced"], audited


def test_the_worker_of_the_stage_has_a_lane(run: Started) -> None:
    assert {span.state for span in read_spans(run.folder)["stage-agent-reference-0"]} == {"infer", "idle"}


def test_the_trainer_reads_what_the_stage_wrote(run: Started) -> None:
    steps = read_metrics(run.folder / "metrics.jsonl", "agent").steps
    assert all(step["kl"] >= 0 for step in steps)
    assert steps[-1]["kl"] > 1e-3  # the policy has moved from its reference
    assert not any("reference_logprobs" in name for step in steps for name in step)


def test_what_it_wrote_is_the_trainers_own_reference(run: Started) -> None:
    recipe = read_resolved(run.folder / "recipe.yaml")
    own = Roles(recipe.policies["agent"], Alone(), torch.device("cpu"), recipe.seed, in_order=False).reference()
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as ledger:
        rows = ledger.execute(
            "SELECT s.unit, s.segment, s.offset, s.length, e.unit, e.segment, e.offset, e.length, s.tokens, s.trained "
            "FROM extras e JOIN samples s USING (grp, place, n) WHERE s.policy = e.producer AND e.stage = 'reference'"
        ).fetchall()
    assert rows
    reader = SegmentReader(unit_folder(run.folder))
    sampled = reader.read(
        [Place(*row[1:4]) for row in rows], {name: np.dtype(COLUMNS[name]) for name in TRAINED_COLUMNS}
    )
    written = reader.read([Place(*row[5:8]) for row in rows], {WRITTEN: np.dtype("<f4")})
    samples = [
        BatchSample(
            id=str(place), row=Row(*row[:4]), tokens=row[8], trained=row[9], reward=0.0, group="g", group_mean=0.0,
            group_std=1.0, group_size=1, staleness=0, truncated=False, member=0,
        )
        for place, row in enumerate(rows)
    ]  # fmt: skip
    data = Databuffer(make_rows(samples, sampled))
    np.testing.assert_allclose(np.concatenate([row[WRITTEN] for row in written]), own.infer(data), atol=1e-5)


def unit_folder(run: Path) -> Path:
    (folder,) = (run / "units").iterdir()
    return folder
