from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.config import load_recipe
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path / "runs", now=0.0)


def test_a_run_can_be_opened_again(folder: RunFolder) -> None:
    again = RunFolder.open(folder.root)
    assert again.recipe == load_recipe("quickstart")
    assert len(again.token) >= 32


def test_only_the_owner_reads_the_token(folder: RunFolder) -> None:
    assert (folder.root / "run.json").stat().st_mode & 0o077 == 0


def test_two_runs_in_one_second_get_two_folders(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(load_recipe("quickstart"), tmp_path / "runs", now=0.0)
    assert other.root != folder.root
    assert other.token != folder.token


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_one_supervisor_at_a_time(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(RunError, match="another process"), folder.locked():
        pass
    with folder.locked():
        pass


def test_endpoints_keep_their_port(folder: RunFolder) -> None:
    assert folder.last_port("dataflow") == 0
    folder.publish_endpoint("dataflow", "http://127.0.0.1:4321")
    assert folder.last_port("dataflow") == 4321


def test_state(folder: RunFolder) -> None:
    assert folder.state()["state"] == "new"
    folder.set_state("failed", "because")
    assert folder.state()["reason"] == "because"
