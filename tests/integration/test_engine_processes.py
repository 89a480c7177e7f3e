"""A real run whose nodes sample on engine processes: one joins by URL, one is killed in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, all_processes_of, frozen_trainer, steps_of, wait_until

RUN = [
    "trainer.steps=12",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
    "rollout.episodes=16",
    "rollout.engines=2",
    "rollout.pause_after={seconds: 20, at_most: 5}",
    "runtime.weights_server=true",
]


@pytest.mark.slow
def test_an_engine_joins_by_url_and_one_dies(tmp_path: Path, cli: Cli) -> None:
    run = cli.start("run", "stockroom", *RUN)
    wait_until(lambda: any(run.runs.iterdir()) and (run.folder / "endpoints" / "weights.json").is_file(), "a run", 600)
    token = tmp_path / "token"
    token.write_text(json.loads((run.folder / "run.json").read_text())["token"])
    url = json.loads((run.folder / "endpoints" / "dataflow.json").read_text())["url"]
    wait_until(lambda: steps_of(run.folder) >= 2, "two steps", 600)
    node = run.folder / "logs" / "rollout-0.log"
    with frozen_trainer(run.folder):
        engine = cli.start("engine", "--join", url, "--token-file", str(token), "--name", "far")
        wait_until(lambda: "engine far registered" in node.read_text(), "the engine to join", 600)
    victim = next(process for role, process in all_processes_of(run.folder) if role == "engine")
    victim.kill()
    assert run.wait(600) == 0, run.output()[-3000:]
    assert engine.wait(120) == 0, engine.output()[-3000:]
    assert "the run has ended" in engine.output()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 12
    assert json.loads((run.folder / "state.json").read_text())["state"] == "finished"
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
