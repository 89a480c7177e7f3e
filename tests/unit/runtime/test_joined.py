"""Processes that join by URL: their signals and their folders."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rillflow.config import load_recipe
from rillflow.errors import ConfigError, RunError
from rillflow.rollout.node import Departure
from rillflow.runtime import joined as module
from rillflow.runtime.joined import JoinOptions, _check_code, _own_folder, _start, _until_gone, _with_episodes
from rillflow.runtime.process import STOPPED


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RILLFLOW_TOKEN", "secret")


async def life(ready: bool, signals: int, leaves: bool) -> tuple[int, bool]:
    """Return the exit code of a node that gets `signals` signals, and whether it was asked to leave."""
    departure, gone = Departure(), asyncio.Event()
    if leaves:
        departure.on_change = gone.set

    async def send() -> None:
        for _ in range(signals):
            await asyncio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

    sending = asyncio.create_task(send())
    code = await asyncio.wait_for(_until_gone(_wait(gone), departure, 30.0, lambda: ready), 60)
    await sending
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    return code, departure.begun


async def _wait(gone: asyncio.Event) -> None:
    await gone.wait()


async def test_the_first_signal_makes_it_leave():
    assert await life(ready=True, signals=1, leaves=True) == (0, True)


async def test_the_second_ends_it_at_once():
    assert await life(ready=True, signals=2, leaves=False) == (STOPPED, True)


async def test_before_it_is_ready_there_is_nothing_to_leave():
    assert await life(ready=False, signals=1, leaves=True) == (0, False)


def test_without_a_cache_nothing_is_kept():
    with _own_folder(JoinOptions("http://h"), "n") as folder:
        (folder / "sessions").mkdir()
    assert not folder.exists()


def test_a_cache_has_a_folder_for_every_run_and_name(tmp_path: Path, monkeypatch):
    def folder(name: str) -> Path:
        with _own_folder(JoinOptions("http://h", cache=tmp_path), name) as found:
            return found

    first = folder("n")
    assert first.is_dir()
    assert folder("n") == first
    assert folder("m") != first
    monkeypatch.setenv("RILLFLOW_TOKEN", "of another run")
    assert folder("n") != first


def test_two_processes_of_a_name_do_not_share_a_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "_PREDECESSOR_WAIT", 0.05)
    options = JoinOptions("http://h", cache=tmp_path)
    with _own_folder(options, "n"), pytest.raises(RunError, match="another process is n of"), _own_folder(options, "n"):
        pass


def test_a_cache_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be made"),
        _own_folder(JoinOptions("http://h", cache=tmp_path / "file"), "n"),
    ):
        pass


@pytest.mark.parametrize("name", ["../up", "a b", ".hidden", "n" * 201])
def test_odd_names(name, monkeypatch):
    monkeypatch.setattr(module, "prepare", lambda: None)
    with pytest.raises(ConfigError, match="cannot be the name of a node"):
        _start(name)


def test_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "prepare", lambda: None)
    monkeypatch.setattr(module.platform, "node", lambda: "a host's näme")
    assert _start(None) == f"a-host-s-n-me-{os.getpid()}"


def test_episodes():
    recipe = load_recipe("quickstart")
    assert _with_episodes(recipe, None) is recipe
    assert _with_episodes(recipe, 3).rollout.episodes == 3
    assert recipe.rollout.episodes != 3


def test_a_workflow_that_is_not_on_this_host():
    recipe = load_recipe("quickstart", ["workflow=nowhere.to_be_found:play"])
    with pytest.raises(ConfigError, match=r"not on this host.*nowhere") as caught:
        _check_code(recipe)
    assert "must be installed here" in caught.value.hint
