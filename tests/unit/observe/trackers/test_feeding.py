from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rillflow.config import ObserveConfig, load_recipe
from rillflow.config.runs import JsonlConfig, MlflowConfig, OpenTelemetryConfig, TrackersConfig, WandbConfig
from rillflow.errors import ConfigError
from rillflow.observe.trackers import Trackers, check_trackers
from rillflow.observe.trackers.feed import Feed, JsonLines, flat, point_of
from rillflow.observe.trackers.services import TensorBoard
from rillflow.runtime.folder import RunFolder

QUICK = 0.01
LONG = 60.0


def step(seq: int, reward: float, **changes: Any) -> dict[str, Any]:
    line = {"seq": seq, "policy": "agent", "step": seq, "version": seq, "time": 10.0 + seq, "reward": reward}
    return {**line, "counters": {"trained": 3}, **changes}


def evaluation(seq: int, version: int) -> dict[str, Any]:
    sources = {"by_source": {"math": 0.25, "code": None}, "episodes": 8, "failed": 0, "episode/forks": 1.5}
    return {"seq": seq, "event": "evaluation", "step": 3, "version": version, "time": 1.0, "reward": 0.5, **sources}


def rollback(seq: int, version: int) -> dict[str, Any]:
    gone = {"orphaned": [version + 1, version + 2], "groups": 4, "tasks": 0}
    return {"seq": seq, "event": "rollback", "policy": "agent", "version": version, "step": 1, "time": 2.0, **gone}


def write(path: Path, *lines: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


class Sent:
    """A feed of JSON lines in a folder, and what has come out of it."""

    def __init__(self, folder: Path) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.path = folder / "out" / "scalars.jsonl"
        self.note = folder / "trackers" / "jsonl.json"

    def feed(self, **options: Any) -> Feed:
        feed = Feed("jsonl", lambda _: JsonLines(self.path), self.metrics, self.note, poll=QUICK, **options)
        feed.start()
        return feed

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    return Sent(tmp_path)


def ended(feed: Feed, seconds: float = LONG) -> list[str]:
    feed.stop("finished")
    feed.join(seconds)
    return feed.news


def test_the_numbers_of_each_line() -> None:
    point = point_of(step(3, 0.5), several=False)
    assert point is not None
    assert (point.axis, point.step, point.named) == ("step", 3, {"reward": 0.5})
    several = point_of(step(3, 0.5, policy="checker"), several=True)
    assert several is not None
    assert several.named == {"checker/reward": 0.5}
    heldout = point_of(evaluation(4, 7), several=True)
    assert heldout is not None
    assert (heldout.axis, heldout.step) == ("version", 7)
    wanted = {"reward": 0.5, "math": 0.25, "episode/forks": 1.5, "episodes": 8.0, "failed": 0.0}
    assert heldout.named == {f"heldout/{name}": value for name, value in wanted.items()}
    back = point_of(rollback(5, 1), several=True)
    assert back is not None
    assert (back.step, back.named) == (1, {"agent/rollback/version": 1.0, "agent/rollback/orphaned": 2.0})
    assert point_of({"seq": 6, "event": "balance", "time": 1.0}, several=False) is None


def test_a_resumed_run_goes_on_where_its_tracker_was(sent: Sent) -> None:
    write(sent.metrics, step(1, 0.1), step(2, 0.2))
    assert ended(sent.feed()) == []
    write(sent.metrics, rollback(3, 1), step(4, 0.4, step=2))
    assert ended(sent.feed()) == []
    assert ended(sent.feed()) == []
    rewards = [line["values"].get("reward") for line in sent.lines()]
    assert rewards == [0.1, 0.2, None, 0.4]
    assert sent.lines()[2]["values"] == {"rollback/version": 1.0, "rollback/orphaned": 2.0}


def test_lines_that_the_service_wrote_again_after_a_crash_are_not_repeated(sent: Sent) -> None:
    write(sent.metrics, step(1, 0.1), step(2, 0.2))
    ended(sent.feed())
    text = sent.metrics.read_text()
    sent.note.write_bytes(b'{"sent": 2, "at": 0, "ids": {}}')  # as if the file were another, with the same lines
    sent.metrics.write_text(text)
    write(sent.metrics, step(3, 0.3))
    ended(sent.feed())
    assert [line["step"] for line in sent.lines()] == [1, 2, 3]


def test_a_tracker_that_fails_is_told_once_and_gets_everything_later(sent: Sent) -> None:
    """A folder stands where the file should be, until it is removed."""
    sent.path.mkdir(parents=True)
    write(sent.metrics, step(1, 0.1), step(2, 0.2))
    told = ended(sent.feed())
    assert "fails, and is tried again while the run goes on: IsADirectoryError" in told[0]
    assert told[1:] == ["tracker jsonl: 2 lines of metrics.jsonl could not be sent; `rillflow resume` sends the rest"]
    feed = sent.feed()
    wait_for(lambda: feed.news)
    sent.path.rmdir()
    wait_for(lambda: not feed.unsent())
    assert len(ended(feed)) == 1, "told once"
    assert [line["values"]["reward"] for line in sent.lines()] == [0.1, 0.2]


def test_a_tracker_that_hangs_holds_nobody_up(sent: Sent) -> None:
    """Opening a pipe without a reader blocks."""
    sent.path.parent.mkdir()
    os.mkfifo(sent.path)
    write(sent.metrics, step(1, 0.1))
    feed = sent.feed()
    wait_for(feed.unsent)
    told = ended(feed, seconds=0.05)
    assert told[0] == "tracker jsonl did not finish within 0 s"
    assert "1 line of metrics.jsonl could not be sent" in told[1]
    with sent.path.open() as reader:
        assert reader.readline(), "the thread that hung ends with the test"


def test_nothing_is_made_before_there_is_a_number(tmp_path: Path) -> None:
    feed = Feed("tensorboard", lambda _: TensorBoard(tmp_path / "tb"), tmp_path / "m", tmp_path / "note", poll=QUICK)
    feed.start()
    assert ended(feed) == []
    assert not list(tmp_path.iterdir())


def test_tensorboard_has_the_curves_of_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1, 0.1, loss=0.5), step(2, 0.2, policy="checker", loss=0.5), evaluation(3, 1))
    feed = Feed(
        "tensorboard", lambda _: TensorBoard(tmp_path / "tb"), path, tmp_path / "note", several=True, poll=QUICK
    )
    feed.start()
    assert ended(feed) == []
    (events,) = (tmp_path / "tb").iterdir()
    tags = set(re.findall(rb"[a-z]+/[a-z_]+", events.read_bytes()))
    assert {b"agent/reward", b"checker/reward", b"agent/loss", b"checker/loss", b"heldout/reward"} <= tags
    assert not any(tag.endswith(b"/step") for tag in tags)


def test_a_damaged_note_sends_everything_again(sent: Sent) -> None:
    write(sent.metrics, step(1, 0.1))
    sent.note.parent.mkdir()
    sent.note.write_text("{torn")
    ended(sent.feed())
    assert len(sent.lines()) == 1
    assert json.loads(sent.note.read_text()) == {"sent": 1, "at": sent.metrics.stat().st_size, "ids": {}}


def test_the_trackers_of_a_run(tmp_path: Path) -> None:
    overrides = ("observe.trackers.jsonl={}", "observe.trackers.tensorboard=false")
    folder = RunFolder.create(load_recipe("quickstart", overrides), tmp_path)
    trackers = Trackers(folder)
    write(folder.metrics, step(1, 0.1))
    assert trackers.close("finished") == []
    assert not (folder.root / "trackers").exists(), "a process that does not hold the run sends nothing"
    trackers.start()
    assert trackers.close("finished", LONG) == []
    assert (folder.root / "trackers" / "scalars.jsonl").is_file()
    assert not (folder.root / "tensorboard").exists()


def test_a_tracker_without_its_package_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = load_recipe("quickstart")
    check_trackers(recipe.model_copy(update={"observe": ObserveConfig(trackers=TrackersConfig(jsonl=JsonlConfig()))}))
    for settings in (
        ObserveConfig(trackers=TrackersConfig(wandb=WandbConfig())),
        ObserveConfig(trackers=TrackersConfig(mlflow=MlflowConfig())),
        ObserveConfig(opentelemetry=OpenTelemetryConfig(endpoint="http://127.0.0.1:1/v1/traces")),
    ):
        with pytest.raises(ConfigError, match="needs the package") as refused:
            check_trackers(recipe.model_copy(update={"observe": settings}))
        assert "pip install 'rillflow[" in refused.value.hint


def test_a_supervised_run_that_went_back_sends_each_line_once(sent: Sent) -> None:
    """Its lines are written again after the checkpoint, under the same numbers; their lengths may differ."""
    held = {"seq": 1, "event": "evaluation", "step": 0, "time": 1.0, "loss": 2.5}
    write(sent.metrics, held, *({"seq": n + 1, "step": n, "time": 1.0, "loss": 1.0} for n in (1, 2, 3)))
    assert ended(sent.feed()) == []
    lines = sent.metrics.read_text().splitlines(keepends=True)
    sent.metrics.write_text("".join(lines[:2]))
    write(sent.metrics, *({"seq": n + 1, "step": n, "time": 1.0, "loss": 0.123456789} for n in (2, 3, 4)))
    assert ended(sent.feed()) == []
    found = [(line["step"], line["values"]) for line in sent.lines()]
    assert found[0] == (0, {"heldout/loss": 2.5})
    assert found[1:] == [*((n, {"loss": 1.0}) for n in (1, 2, 3)), (4, {"loss": 0.123456789})]


def test_a_recipe_as_flat_texts() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": "1", "a.c": "{}", "d": "[1, 2]"}


def wait_for(condition: Any) -> None:
    waited = threading.Event()
    for _ in range(int(LONG / QUICK)):
        if condition():
            return
        waited.wait(QUICK)
    raise AssertionError("not within a minute")


def test_what_goes_wrong_in_the_process_of_a_tracker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that raises when it is imported stands for all that may go wrong there."""
    overrides = ("observe.trackers.mlflow={}", "observe.trackers.tensorboard=false")
    folder = RunFolder.create(load_recipe("quickstart", overrides), tmp_path)
    write(folder.metrics, step(1, 0.1))
    (tmp_path / "mlflow.py").write_text("raise RuntimeError('no such server')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    trackers = Trackers(folder)
    trackers.start()
    assert trackers.close("finished", LONG) == [
        "tracker mlflow fails, and is tried again while the run goes on: RuntimeError: no such server",
        "tracker mlflow: 1 line of metrics.jsonl could not be sent; `rillflow resume` sends the rest",
    ]
    assert "no such server" in folder.log("tracker-mlflow").read_text()


def test_a_tracker_whose_process_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("observe.trackers.mlflow={}", "observe.trackers.tensorboard=false")
    folder = RunFolder.create(load_recipe("quickstart", overrides), tmp_path)
    write(folder.metrics, step(1, 0.1), step(2, 0.2))
    (tmp_path / "mlflow.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    trackers = Trackers(folder)
    trackers.start()
    assert trackers.close("finished", LONG) == [
        f"tracker mlflow ended with code 7; see {folder.log('tracker-mlflow')}",
        "tracker mlflow: 2 lines of metrics.jsonl could not be sent; `rillflow resume` sends the rest",
    ]
