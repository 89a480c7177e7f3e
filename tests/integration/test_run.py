"""A short real run: every process, every file that a user is promised."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import rillflow
from chrome_trace import check_trace, flows_of
from commands import Cli, Started, processes_of, steps_of, wait_until
from docs_blocks import READING, command_lines
from exposed_metrics import check_board, check_table
from loaded_modules import LoadedModules
from rillflow.cli.main import app

SHORT = [
    "trainer.steps=3",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "rollout.episodes=16",
]


@pytest.mark.slow
def test_a_short_run_leaves_what_it_promises(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModules(cli.cwd / "loaded")
    for name, value in loaded.environment.items():
        monkeypatch.setenv(name, value)
    run = cli.run("run", "stockroom", *SHORT, "--profile", "2")
    folder = run.folder
    for name in ("recipe.yaml", "metrics.jsonl", "reward.png", "summary.json", "state.json", "ledger.sqlite"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").iterdir())
    started = {"dataflow", "forkserver", "unit-0", "rollout-0", "trainer-agent"}
    assert {p.stem for p in (folder / "logs").iterdir()} == started
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert [e["version"] for e in summary["heldout"]] == [0, 3]
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    assert str(folder) in run.output().replace("\n", "")
    assert processes_of(folder) == {}
    for light in ("run", "dataflow", "unit"):  # `run` draws a plot with matplotlib at its end
        assert not {"torch", "transformers", "numba", "openai", "aiohttp", "pandas"} & loaded.of(light), light

    assert_keeps_trajectories(folder)
    execute_trajectories_page(folder)
    execute_documented_commands(folder)
    report = cli.run("audit", str(folder), "--json")
    audited = json.loads(report.output())
    assert audited["balanced"]
    assert (folder / "profiles" / "agent" / "steps-2.rank-0.json").stat().st_size > 0

    cli.run("trace", str(folder))
    trace = json.loads((folder / "trace.json").read_text())
    check_trace(trace)
    assert {"b000000", "step to version 1"} <= {name for flow in flows_of(trace).values() for name in flow}
    life = cli.run("trace", str(folder), "--episode", "t000000.0").output()
    assert "admitted as group t000000" in life

    again = cli.run("resume", str(folder))
    assert "nothing to resume" in again.output()


def execute_documented_commands(folder: Path) -> None:
    """Every documented command that reads a run, with the folder of this one."""
    lines = {re.sub(r"RUN|runs/\w+-[\w…-]+", str(folder), line.values[0]) for line in command_lines()}
    chosen = [words for words in map(shlex.split, sorted(lines)) if words[1] in READING and "t000014.3" not in words]
    assert {words[1] for words in chosen} == READING
    with contextlib.chdir(folder.parents[1]):
        for words in chosen:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (words, result.output)


def execute_trajectories_page(folder: Path) -> None:
    """The snippet of docs/trajectories.md, with the folder of this run."""
    page = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(code.replace("runs/quickstart-20261118-033123", str(folder)), {})


def assert_keeps_trajectories(folder: Path) -> None:
    """Trajectories of each step and each evaluation are kept; trained ones have the trainer's values."""
    kept = rillflow.trajectories(folder)
    assert len(rillflow.trajectories(folder, lane="evaluation")) == 16
    trained = rillflow.trajectories(folder, lane="train", status="done")
    assert {info.step for info in trained.infos()} == {1, 2, 3}
    assert {info.kept for info in kept.infos()} >= {"sample", "evaluation"}
    for one in trained:
        info = one.info
        assert info.advantage is not None
        assert info.gap is not None
        if info.step == 1:
            assert info.gap < 0.01, "engine and trainer agree on fresh tokens"
        assert one.payload
        assert one.messages()[-1]["role"] == "assistant"
        assert sum(len(path.tokens) for path in one.samples) == info.tokens
        assert all(path.path is not None for path in one.samples)
        for path in one.samples:
            assert path.advantages is not None
            assert np.isfinite(path.advantages[path.mask == 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "starting"])
def test_ctrl_c_stops_everything_soon(cli: Cli, moment: str) -> None:
    run = cli.start("run", "stockroom", *SHORT, "trainer.steps=200")
    match moment:
        case "at once":
            wait_until(lambda: any(run.runs.iterdir()), "the run folder")
        case "starting":
            wait_until(lambda: any(run.runs.iterdir()) and "rollout" in processes_of(run.folder), "the node")
    interrupt_and_check(run)


def interrupt_and_check(run: Started) -> None:
    run.interrupt()
    assert run.wait(60) == 130  # five seconds on an idle machine
    assert processes_of(run.folder) == {}
    assert "rillflow resume" in run.output()
    assert json.loads((run.folder / "state.json").read_text())["state"] == "stopped"


@pytest.mark.slow
def test_a_running_run_is_closed_measured_and_alone_and_stops_on_ctrl_c(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *SHORT, "trainer.steps=200")
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 2, "two steps", 600)
    token = json.loads((run.folder / "run.json").read_text())["token"]
    names, folder = {"dataflow", "unit-0", "rollout-0", "trainer-agent"}, run.folder / "endpoints"
    wait_until(lambda: {path.stem for path in folder.glob("*.json")} >= names, "every process to listen", 600)
    services = {name: json.loads((folder / f"{name}.json").read_text())["url"] for name in sorted(names)}
    exposed: dict[str, str] = {}
    for name, url in services.items():
        assert url.startswith("http://127.0.0.1:")
        assert fetch(f"{url}/metrics", "") == (401, "")
        status, exposed[name] = fetch(f"{url}/metrics", token)
        assert status == 200
    check_table(exposed)
    check_board(exposed)
    second = cli.run("resume", str(run.folder), code=2)
    assert "another process is running" in second.output()
    interrupt_and_check(run)


def fetch(url: str, token: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
