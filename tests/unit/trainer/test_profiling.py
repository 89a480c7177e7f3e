from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop_world import Crash, Ledger, crash_at, start
from pydantic import ValidationError

from rillflow.config import TrainerConfig
from rillflow.trainer.process import StepProfiler


def steps_in(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events), "it saw what torch computed"
    return {event["name"] for event in events if str(event.get("name")).startswith("optimizer step")}


def test_the_chosen_steps_are_profiled_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler.of("2-3", tmp_path / "profiles", rank=0)
    start(tmp_path, Ledger(4), profiler=profiler)
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "steps-2-3.rank-0.json"
    assert steps_in(path) == {"optimizer step 2", "optimizer step 3"}


def test_a_run_that_ends_before_the_last_step_leaves_what_was_seen(tmp_path: Path) -> None:
    start(tmp_path, Ledger(2), profiler=StepProfiler.of("2-9", tmp_path / "profiles", rank=0))
    assert steps_in(tmp_path / "profiles" / "steps-2-9.rank-0.json") == {"optimizer step 2"}


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profiles").write_text("a file stands where the folder should be")
    ledger = Ledger(3)
    start(tmp_path, ledger, profiler=StepProfiler.of("1", tmp_path / "profiles", rank=0))
    assert len(ledger.live) == 3
    assert "the profile was not written" in caplog.text


def test_a_trainer_that_fails_stops_its_profiler(tmp_path: Path) -> None:
    """torch has one profiler in a process: one that was left running would make the next fail."""
    ledger = Ledger(4, before=crash_at("commit b1 2"))
    with pytest.raises(Crash):
        start(tmp_path, ledger, profiler=StepProfiler.of("1-4", tmp_path / "profiles", rank=0))
    start(tmp_path / "again", Ledger(1), profiler=StepProfiler.of("1", tmp_path / "profiles", rank=0))
    assert steps_in(tmp_path / "profiles" / "steps-1.rank-0.json") == {"optimizer step 1"}


def test_which_steps_can_be_named() -> None:
    assert StepProfiler.of(None, Path(), rank=0) is None
    for steps in ("3", "3-5", "1-20"):
        assert TrainerConfig(profile=steps).profile == steps
    for steps in ("0", "5-3", "1-21", "three", "3-"):
        with pytest.raises(ValidationError):
            TrainerConfig(profile=steps)
