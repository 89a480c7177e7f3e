from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import rillflow
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, RunError
from rillflow.runtime import folder as module
from rillflow.runtime import roles
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import settle_port
from rillflow.storage import read_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path / "runs", now=0.0)


def test_a_run_can_be_opened_again(folder: RunFolder) -> None:
    again = RunFolder.open(folder.root)
    assert again.recipe == load_recipe("quickstart")
    assert len(again.token) >= 32


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
def test_only_the_owner_reads_what_may_be_secret(folder: RunFolder, name: str) -> None:
    assert (folder.root / name).stat().st_mode & 0o777 == 0o600


def test_what_runs_from_a_path_leaves_a_run_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "installed", nothing_installed)
    made = RunFolder.create(load_recipe("quickstart"), tmp_path)
    versions = read_json(made.root / "run.json")["versions"]
    assert (versions["rillflow"], versions["torch"]) == (rillflow.__version__, "absent")


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


def test_many_runs_at_the_same_moment_get_a_folder_each(tmp_path: Path) -> None:
    recipe, start = load_recipe("quickstart"), threading.Barrier(8)

    def create(_: int) -> Path:
        start.wait(60)
        return RunFolder.create(recipe, tmp_path / "runs", now=0.0).root

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 8


def test_nobody_else_reads_the_token_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        if Path(target).name == "run.json":
            seen.append(bool(source.stat().st_mode & 0o077 and source.parent.stat().st_mode & 0o077))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path / "runs")
    assert seen == [False]
    assert folder.root.stat().st_mode == (folder.root / "logs").stat().st_mode


@pytest.mark.parametrize("text", ["", "a: [", "\x00"])
def test_a_recipe_that_was_damaged_is_named(folder: RunFolder, text: str) -> None:
    (folder.root / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        _ = folder.recipe


def test_a_process_waits_for_its_predecessor_to_go(folder: RunFolder) -> None:
    with folder.locked("trainer-agent"):
        with pytest.raises(RunError, match="another process is trainer-agent"), folder.locked("trainer-agent", 0.2):
            pass
        with folder.locked("dataflow"), folder.locked():
            pass
    held = threading.Event()

    def predecessor() -> None:
        with folder.locked("trainer-agent"):
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=predecessor)
    thread.start()
    assert held.wait(60)
    with folder.locked("trainer-agent", 60.0):
        assert thread.join(60) is None
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("role", "play"),
    [
        ("trainer-agent", lambda folder: roles.trainer_role(folder, "agent")),
        # The ranks of a trainer outlive a launcher that was killed by a few seconds.
        ("trainer-agent-rank0", lambda folder: roles.trainer_role(folder, "agent")),
        ("dataflow", roles.dataflow_role),
    ],
)
def test_a_role_is_played_once(
    folder: RunFolder, role: str, play: Callable[[RunFolder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "PREDECESSOR_WAIT", 0.1)
    monkeypatch.setattr(roles, "prepare", lambda: None)
    folder.publish_endpoint("dataflow", "http://127.0.0.1:1")
    with folder.locked(role), pytest.raises(RunError, match="another process"):
        play(folder)


async def test_a_port_that_somebody_else_has_taken_is_given_up(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        folder.publish_endpoint("dataflow", f"http://127.0.0.1:{port}")
        await settle_port(folder, patience=0.2)
        assert folder.last_port("dataflow") == 0
        folder.publish_endpoint("dataflow", f"http://127.0.0.1:{port}")
    await settle_port(folder, patience=0.2)
    assert folder.last_port("dataflow") == port
