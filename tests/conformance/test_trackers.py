"""Real trackers take what a run writes: Weights & Biases offline, an MLflow server, and a receiver of OTLP."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dataflow_world import World
from needs import ROOT
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import Span

pytestmark = [pytest.mark.trackers, pytest.mark.needs("trackers")]

PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "trackers"
SECONDS = 300.0
# Neither package may look for its maker's servers.
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", **QUIET}


def script(name: str, *arguments: object, home: Path) -> Any:
    """Return what a script printed as its last line, which is JSON."""
    command = [str(PYTHON), str(SCRIPTS / name), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(home), cwd=home, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    command = [str(PYTHON), str(SCRIPTS / "mlflow_server.py"), str(folder)]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, env=environment(folder), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdigit(), (folder / "server.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def step(seq: int, policy: str, number: int, reward: float) -> dict[str, Any]:
    when = 1000.0 + seq
    return {
        "seq": seq,
        "policy": policy,
        "step": number,
        "version": number,
        "time": when,
        "reward": reward,
        "loss": 0.5,
    }


FIRST = [
    {"seq": 1, "event": "evaluation", "version": 0, "time": 1001.0, "reward": 0.25, "episodes": 4, "failed": 0},
    step(2, "solver", 1, 0.1),
    step(3, "verifier", 1, 0.6),
    step(4, "solver", 2, 0.2),
]
SECOND = [
    {"seq": 5, "event": "rollback", "policy": "solver", "version": 1, "step": 1, "orphaned": [2], "time": 1005.0},
    step(6, "solver", 2, 0.3),
]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two policies and its resume, in both trackers."""
    home = tmp_path_factory.mktemp("trackers")
    with mlflow_server(home) as url:
        overrides = (
            "observe.trackers.wandb.mode=offline", "observe.trackers.wandb.project=colours",
            "observe.trackers.wandb.tags=[red, blue]", "observe.trackers.wandb.name=first try",
            f"observe.trackers.mlflow.tracking_uri={url.replace('://', '://user:hidden@')}",
            "observe.trackers.mlflow.experiment=colours", "observe.trackers.mlflow.tags.team=rl",
        )  # fmt: skip
        folder = RunFolder.create(load_recipe("solver_verifier", overrides), home)
        for name, lines in (("first", FIRST), ("second", SECOND)):
            (home / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = script("feed.py", folder.root, home / "first", home / "second", home=home)
    wandb = script("read_wandb.py", folder.root / "trackers", home=home)
    return {**found, "wandb": wandb, "folder": folder}


def test_nothing_failed(tracked: dict[str, Any]) -> None:
    assert tracked["news"] == []


def test_wandb_has_every_point_once_under_the_names_of_its_policy(tracked: dict[str, Any]) -> None:
    rows = tracked["wandb"]["rows"]
    assert [row["solver/reward"] for row in rows if "solver/reward" in row] == [0.1, 0.2, 0.3]
    assert [row["solver/step"] for row in rows if "solver/reward" in row] == [1, 2, 2]
    assert [row["verifier/reward"] for row in rows if "verifier/reward" in row] == [0.6]
    assert [row["heldout/version"] for row in rows if "heldout/reward" in row] == [0]
    assert [row["solver/rollback/version"] for row in rows if "solver/rollback/version" in row] == [1]


def test_wandb_draws_each_policy_over_its_own_steps(tracked: dict[str, Any]) -> None:
    axes = tracked["wandb"]["axes"]
    assert axes["solver/reward"] == "solver/step"
    assert axes["verifier/loss"] == "verifier/step"
    assert axes["heldout/reward"] == "heldout/version"


def test_a_resumed_run_is_the_same_run_at_wandb(tracked: dict[str, Any]) -> None:
    found = tracked["wandb"]
    assert len(found["ids"]) == 2
    assert len(set(found["ids"])) == 1
    assert set(found["names"]) == {"first try"}
    assert set(found["projects"]) == {"colours"}
    assert found["tags"][0] == ["red", "blue"]


def test_the_recipe_is_there_without_its_secrets(tracked: dict[str, Any]) -> None:
    config, parameters = tracked["wandb"]["config"], tracked["mlflow"]["params"]
    assert config["name"] == parameters["name"] == "solver_verifier"
    assert parameters["observe.trackers.mlflow.experiment"] == "colours"
    assert "hidden" not in json.dumps(config)
    assert "hidden" not in json.dumps(parameters)


def test_mlflow_has_every_point_once(tracked: dict[str, Any]) -> None:
    found = tracked["mlflow"]
    assert found["runs"] == 1, "the resumed run is the same run"
    assert found["history"]["solver/reward"] == [[1, 0.1, 1002000], [2, 0.2, 1004000], [2, 0.3, 1006000]]
    assert found["history"]["verifier/reward"] == [[1, 0.6, 1003000]]
    assert found["history"]["solver/rollback/version"] == [[1, 1.0, 1005000]]
    assert found["history"]["heldout/reward"] == [[0, 0.25, 1001000]]


def test_mlflow_knows_the_run(tracked: dict[str, Any]) -> None:
    found = tracked["mlflow"]
    assert (found["name"], found["status"]) == (tracked["folder"].root.name, "FINISHED")
    assert found["tags"]["team"] == "rl"


def test_opentelemetry_gets_every_span_once_and_steps_lead_to_their_episodes(tmp_path: Path) -> None:
    world = World(tmp_path)
    failed, *leases = world.lease(4)
    world.clock.time += 1
    world.fail(failed, "tool_error")
    for lease in [*leases, *world.lease()]:
        world.done(lease)
    world.clock.time += 1
    world.step()
    world.ledger.commit()
    world.close()
    world.path.rename(tmp_path / "ledger.sqlite")
    states = [Span("rollout", 1000.0, 1001.5), Span("idle", 1001.5, 1002.0), Span("load", 1002.0, 1002.25)]
    (tmp_path / "timeline").mkdir()
    lines = (json.dumps([span.state, span.begin, span.end]) + "\n" for span in states)
    (tmp_path / "timeline" / "n0.jsonl").write_text("".join(lines))

    found = script("otlp.py", tmp_path, home=tmp_path)
    assert "fails, and is tried again while the run goes on" in found["refused"][0]
    assert "5 episodes could not be sent" in found["refused"][1]
    assert found["news"] == found["again"] == []
    spans = {span["name"]: span for span in found["spans"] if not span["name"].startswith("episode ")}
    episodes = [span for span in found["spans"] if span["name"].startswith("episode ")]
    assert len(found["spans"]) == len({span["span"] for span in found["spans"]}) == 5 + 3, "none is sent twice"
    assert [one["attributes"]["rillflow.cause"] for one in episodes if one["failed"]] == ["tool_error"]
    first = next(one for one in episodes if one["failed"])
    assert (first["begin"], first["end"]) == (1_000 * 10**9, 1_001 * 10**9)
    assert first["attributes"]["rillflow.prompt"] == "p0"
    assert first["resource"]["service.name"] == "rillflow"
    retried = [one for one in episodes if one["name"] == first["name"]]
    assert len({one["trace"] for one in retried}) == 1 < len(retried), "leases of an episode are one trace"
    step = spans["step to version 1"]
    assert set(step["links"]) == {one["span"] for one in episodes if not one["failed"]}
    assert spans["rollout"]["attributes"] == {"rillflow.worker": "n0"}
    assert spans["load"]["end"] - spans["load"]["begin"] == 250_000_000


def test_a_server_that_never_answers_does_not_hold_a_run_up(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart", ("observe.trackers.wandb.mode=online",)), tmp_path)
    folder.metrics.write_text(json.dumps(step(1, "agent", 1, 0.1)) + "\n")
    news = script("silent.py", folder.root, home=tmp_path)
    assert news == [
        "tracker wandb did not finish within 2 s",
        "tracker wandb: 1 line of metrics.jsonl could not be sent; `rillflow resume` sends the rest",
    ]
