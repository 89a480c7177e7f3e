"""`rillflow advise` on a run that was left, on a live service, and in the view of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.observe.advisories import FactReader, Facts
from rillflow.observe.advisories.rules import EVERY, Watch
from rillflow.runtime.folder import RunFolder
from rillflow.storage import write_json
from rillflow.types import Status
from rillflow.types.routes import Dataflow
from rillflow.wire import Service
from rillflow.wire.blocking import LoopThread

WAITS = "the trainer of agent waits for a batch: 0 of 16 groups ready"
STATUS = Status(
    phase="training", reason="", steps=0, total_steps=24, versions={"agent": 0}, reward=None, samples_per_second=0.0,
    staleness=0.0, wait_fraction=0.0, counts={}, evaluations=[], nodes=0, waits=[WAITS],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path)


def begin(folder: RunFolder) -> None:
    """Let the run have begun long ago."""
    write_json(folder.root / "state.json", {"state": "running", "reason": "", "time": time.time() - 1000})


@contextmanager
def served(folder: RunFolder) -> Iterator[None]:
    """A service of a run that has made no step for a long time."""
    thread, service = LoopThread("service"), Service("dataflow", folder.keyring)

    async def status() -> Status:
        return STATUS

    service.on(Dataflow.status, status)
    try:
        folder.publish_endpoint("dataflow", thread.run(service.start(), 10.0))
        yield
        thread.run(service.stop(), 10.0)
    finally:
        thread.close()


def advised(folder: RunFolder, *options: str) -> str:
    result = CliRunner().invoke(app, ["advise", str(folder.root), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_that_failed(folder: RunFolder) -> None:
    folder.set_state("failed", "no batch within 600 s")
    text = advised(folder)
    assert text.startswith("problem: The run failed: no batch within 600 s.")
    assert "what to do: " in text
    (told,) = json.loads(advised(folder, "--json"))
    assert (told["key"], told["severity"]) == ("failed", "problem")


def test_a_run_without_anything_to_say(folder: RunFolder) -> None:
    folder.set_state("finished", "done")
    assert "nothing to say" in advised(folder)
    assert json.loads(advised(folder, "--json")) == []


def test_a_stall_of_a_live_run_names_what_is_waited_for(folder: RunFolder) -> None:
    begin(folder)
    with served(folder):
        assert WAITS in advised(folder)


def test_a_run_whose_service_has_gone(folder: RunFolder) -> None:
    begin(folder)
    folder.publish_endpoint("dataflow", "http://127.0.0.1:9")
    assert "ended without a word" in advised(folder)
    with folder.locked():
        assert "nothing to say" in advised(folder)


class Later:
    """A clock that is far ahead of the start of the run at every second look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return time.time() + self.seconds


def test_the_view_says_each_problem_once(folder: RunFolder) -> None:
    begin(folder)
    said: list[str] = []
    clock = Later()
    with closing(Watch(folder, said.append, clock=clock)) as watch:
        deadline = time.monotonic() + 60
        watch.look(STATUS)
        assert said == []
        while not said and time.monotonic() < deadline:
            clock.seconds += EVERY
            watch.look(STATUS)
            time.sleep(0.01)
        for _ in range(20):
            clock.seconds += EVERY
            watch.look(STATUS)
            time.sleep(0.01)
    assert len(said) == 1
    assert said[0].startswith("problem: No optimizer step for ")
    assert WAITS in said[0]


def test_a_look_that_fails_ends_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Facts:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(FactReader, "read", broken)
    clock = Later()
    with closing(Watch(folder, lambda line: None, clock=clock)) as watch:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            clock.seconds += EVERY
            watch.look(STATUS)
            time.sleep(0.01)
    assert "cannot be made: unexpected" in caplog.text
