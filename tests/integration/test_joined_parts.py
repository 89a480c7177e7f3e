"""A run of which every part but the dataflow service joins by its URL, each with a token of its own scope, and sees
nothing of the run's folder. The trainer and the unit are killed once; they go on from their caches."""

from __future__ import annotations

import json

import pytest

from commands import Cli, Started, steps_of, wait_until
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder
from rillflow.types import TokenScope
from rillflow.wire.tokens import SCOPES

pytestmark = pytest.mark.slow

STEPS = 8
SMALL = (
    f"trainer.steps={STEPS}", "trainer.batch_groups=2", "dataflow.group_size=4", "trainer.checkpoint_every=2",
    "data.heldout.arguments.count=4", "evaluation.target=null", "rollout.episodes=16", "dataflow.filters=[]",
    "dataflow.task_lease=5",
)  # fmt: skip


class Parts:
    """The processes of one run, by name."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.folder = RunFolder.create(load_recipe("staged", SMALL), cli.cwd / "runs")
        for scope in SCOPES:
            (cli.cwd / f"token-{scope}").write_text(self.folder.token_of(scope))
        self.dataflow = cli.start("dataflow", str(self.folder.root))
        wait_until(lambda: self.folder.endpoint("dataflow"), "the service", 600)

    def join(self, role: str, scope: TokenScope, *words: str, cache: str = "") -> Started:
        kept = ("--cache", str(self.cli.cwd / cache)) if cache else ()
        token = str(self.cli.cwd / f"token-{scope}")
        url = str(self.folder.endpoint("dataflow"))
        return self.cli.start(role, *words, "--join", url, "--token-file", token, *kept)

    def steps(self, wanted: int) -> None:
        wait_until(lambda: steps_of(self.folder.root) >= wanted, f"step {wanted}", 600)


@pytest.fixture(scope="module")
def parts(shared_cli: Cli) -> Parts:
    return Parts(shared_cli)


def test_a_whole_run_of_joined_parts(parts: Parts) -> None:
    unit = parts.join("unit", "unit", cache="payloads")
    trainer = parts.join("trainer", "trainer", cache="training")
    wait_until((parts.folder.root / "endpoints" / "weights-agent.json").is_file, "the trainer to join", 600)
    stage = parts.join("stage", "stage", "reference")
    node = parts.join("rollout", "node")
    parts.steps(2)
    for victim in (unit, trainer):
        victim.process.kill()
        victim.process.wait(60)
    unit = parts.join("unit", "unit", cache="payloads")
    trainer = parts.join("trainer", "trainer", cache="training")
    for part in (trainer, stage, node):
        assert part.wait(600) == 0, part.output()[-4000:]
    assert not (parts.folder.root / "weights").exists()
    assert not (parts.folder.root / "units").exists()
    status = json.loads(parts.cli.run("status", str(parts.folder.root), "--json").output())
    assert status["steps"] == STEPS
    parts.dataflow.process.terminate()
    assert unit.wait(120) == 0, unit.output()[-4000:]
    audited = json.loads(parts.cli.run("audit", str(parts.folder.root), "--json").output())
    assert audited["balanced"], audited


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["unit"], "give --cache FOLDER"),
        (["trainer"], "give --cache FOLDER"),
        (["unit", "--cache", "kept", "--host", "0.0.0.0"], "give --host ADDRESS"),
        (["stage", "a", "b"], "rillflow stage NAME --join URL"),
    ],
)
def test_what_cannot_work_is_one_clear_error(cli: Cli, words, said) -> None:
    (cli.cwd / "token").write_text("secret")
    started = cli.start(*words, "--join", "http://127.0.0.1:9", "--token-file", "token")
    assert started.wait(60) == 3
    assert said in started.output()
    assert "Traceback" not in started.output()
