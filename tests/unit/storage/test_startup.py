"""The stages of a process that starts: written by the process, read by its supervisor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.storage import startup
from rillflow.storage.startup import Starting, read_stage, stage_path, starting


@pytest.fixture(autouse=True)
def nobody_watches_afterwards() -> Iterator[None]:
    yield
    startup._reporter.path = None


def test_a_process_that_nobody_watches_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    startup.doing("loading the model")
    startup.ready()
    assert list(tmp_path.rglob("*")) == []


def test_each_stage_replaces_the_one_before(tmp_path: Path) -> None:
    assert read_stage(tmp_path, "rollout-0") is None
    startup.report_to(tmp_path, "rollout-0", "importing torch")
    first = read_stage(tmp_path, "rollout-0")
    assert first is not None
    assert first.doing == "importing torch"
    startup.doing("loading the model")
    second = read_stage(tmp_path, "rollout-0")
    assert second is not None
    assert second.doing == "loading the model"
    assert first.since <= second.since <= time.time()
    assert [path.name for path in (tmp_path / "starting").iterdir()] == ["rollout-0.json"], "no temporary file is left"


def test_a_process_is_ready_once_others_can_reach_it(tmp_path: Path) -> None:
    startup.report_to(tmp_path, "unit-0", "importing")
    told: list[str] = []
    startup.and_ready(told.append)("http://here")
    assert told == ["http://here"]
    assert starting(tmp_path, "unit-0", began=1.0, now=time.time()) is None


def test_a_process_that_has_said_nothing_is_being_started(tmp_path: Path) -> None:
    assert starting(tmp_path, "unit-0", began=100.0, now=107.0) == Starting("unit-0", "starting the process", 7.0)
    forked = starting(tmp_path, "rollout-0", began=100.0, now=107.0, first="importing torch")
    assert forked == Starting("rollout-0", "importing torch", 7.0)


def test_the_words_of_an_earlier_life_do_not_count(tmp_path: Path) -> None:
    startup.report_to(tmp_path, "unit-0", "importing")
    startup.ready()
    again = time.time() + 60
    assert starting(tmp_path, "unit-0", again, again + 2) == Starting("unit-0", "starting the process", 2.0)


def test_a_stage_has_lasted_since_it_began(tmp_path: Path) -> None:
    startup.report_to(tmp_path, "unit-0", "importing")
    stage = read_stage(tmp_path, "unit-0")
    assert stage is not None
    assert starting(tmp_path, "unit-0", 1.0, stage.since + 12.0) == Starting("unit-0", "importing", 12.0)


def test_a_process_of_another_machine_is_believed_and_not_waited_for(tmp_path: Path) -> None:
    assert starting(tmp_path, "trainer-agent", began=0.0, now=100.0) is None
    startup.report_to(tmp_path, "trainer-agent", "importing torch")
    found = starting(tmp_path, "trainer-agent", 0.0, time.time())
    assert found is not None
    assert found.doing == "importing torch"


@pytest.mark.parametrize("content", [b"", b"{", b'{"doing": 3}', b"[]"])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    stage_path(tmp_path, "unit-0").parent.mkdir()
    stage_path(tmp_path, "unit-0").write_bytes(content)
    assert read_stage(tmp_path, "unit-0") is None


def test_a_disk_that_cannot_take_it_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "starting").write_text("a file, where the folder should be")
    startup.report_to(tmp_path, "unit-0", "importing")
    startup.ready()
