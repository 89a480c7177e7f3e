"""Processes that need no model load neither torch nor anything else that takes long to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loaded_modules import LoadedModules
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder

pytestmark = pytest.mark.slow  # each command is a process of its own

HEAVY = {"torch", "transformers", "matplotlib", "numba", "openai", "pandas", "tensorboardX", "ray", "datasets"}
SECONDS = 60.0


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModules:
    return LoadedModules(tmp_path / "loaded")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path / "runs")


@contextmanager
def running(loaded: LoadedModules, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a role, asked to stop as a supervisor does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rillflow", *arguments],
        env={**os.environ, **loaded.environment, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_dataflow_service_and_a_unit(loaded: LoadedModules, folder: RunFolder) -> None:
    root = str(folder.root)
    with running(loaded, "dataflow", root) as dataflow:
        wait_for(lambda: folder.endpoint("dataflow"), dataflow)
        with running(loaded, "unit", root) as unit:
            wait_for(lambda: folder.endpoint("unit-0"), unit)
    for role in ("dataflow", "unit"):
        assert not (HEAVY | {"aiohttp"}) & loaded.of(role), role


def test_a_unit_that_joins(loaded: LoadedModules, folder: RunFolder, tmp_path: Path) -> None:
    with running(loaded, "dataflow", str(folder.root)) as dataflow:
        wait_for(lambda: folder.endpoint("dataflow"), dataflow)
        options = ("--join", str(folder.endpoint("dataflow")), "--cache", str(tmp_path / "cache"))
        with running(loaded, "unit", *options, RILLFLOW_TOKEN=folder.token_of("unit")) as unit:
            assert unit.stderr is not None
            assert any("listens at" in line for line in unit.stderr)
    assert not (HEAVY | {"aiohttp"}) & loaded.of("unit")


def test_the_weight_server_and_a_relay(loaded: LoadedModules, folder: RunFolder, tmp_path: Path) -> None:
    with running(loaded, "weights", str(folder.root)) as server:
        wait_for(lambda: folder.endpoint("weights"), server)
        url, token = folder.endpoint("weights"), folder.token_of("reader")
        options = ("--upstream", str(url), "--cache", str(tmp_path / "cache"))
        with running(loaded, "relay", *options, RILLFLOW_WEIGHTS_TOKEN=token) as relay:
            assert relay.stderr is not None
            assert any("relay of" in line for line in relay.stderr)
    assert not (HEAVY | {"aiohttp"}) & loaded.of("weights")
    assert not HEAVY & loaded.of("relay")


def test_the_dashboard(loaded: LoadedModules, folder: RunFolder) -> None:
    with running(loaded, "dashboard", str(folder.root)) as dashboard:
        assert dashboard.stderr is not None
        assert any("token=" in line for line in dashboard.stderr)
    assert not HEAVY & loaded.of("dashboard")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "quickstart", "--dry-run"],
        ["recipes"],
        ["environments"],
        ["rewards"],
        ["tools"],
        ["audit", "RUN"],
        ["show", "RUN"],
        ["nodes", "RUN"],
        ["tags", "RUN"],
        ["token", "RUN"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command(loaded: LoadedModules, folder: RunFolder, arguments: list[str]) -> None:
    """Commands that find no run, or no service, have loaded all they would need by then."""
    words = [str(folder.root) if word == "RUN" else word for word in arguments]
    subprocess.run(
        [sys.executable, "-m", "rillflow", *words],
        env={**os.environ, **loaded.environment},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert not (HEAVY | {"aiohttp"}) & loaded.of(arguments[0])
    if arguments == ["--help"]:
        assert not {"numpy", "pydantic", "asyncio"} & loaded.of("--help")
