"""A run's supervisor without its processes: signals, a service that hangs, and what is written down at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rillflow.config import Recipe, load_recipe
from rillflow.errors import DeadlineExceeded
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import LocalRun
from rillflow.runtime.process import signals_held
from rillflow.runtime.supervisor import ProcessSpec
from rillflow.types import PolicyStatus, Status


class Service:
    """Answers as `answer` says."""

    def __init__(self, answer: Callable[[], Status]) -> None:
        self._answer = answer

    async def status(self, deadline: float) -> Status:
        await asyncio.sleep(0)
        return self._answer()


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "phase": "training", "reason": "", "steps": 1, "total_steps": 10, "versions": {}, "reward": None,
        "samples_per_second": 0.0, "staleness": 0.0, "wait_fraction": 0.0, "counts": {}, "evaluations": [], "nodes": 1,
        "waits": [],
    }  # fmt: skip
    return Status(**(values | changes))


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    recipe = load_recipe("quickstart", ["runtime.start_timeout=0.001"])
    return LocalRun(RunFolder.create(recipe, tmp_path), lambda status: None)


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


async def forever() -> Status:
    await asyncio.sleep(60)
    raise AssertionError("not reached")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
async def test_signals_stop_a_run_and_it_is_written_down(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(run, "_run", forever)
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, os.kill, os.getpid(), number)
    loop.call_later(0.11, os.kill, os.getpid(), number)
    async with asyncio.timeout(5.0):
        assert await run.run() is None
    assert run._folder.state()["state"] == "stopped"


async def test_a_signal_before_the_run_listens_is_not_lost(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_run", forever)
    with signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5.0):
            assert await run.run() is None
    assert run._folder.state()["state"] == "stopped"


@pytest.mark.usefixtures("hangup")
async def test_a_run_under_nohup_outlives_its_terminal(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def short() -> Status:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        return status(phase="ended", reason="done")

    monkeypatch.setattr(run, "_run", short)
    assert await run.run() is not None
    assert run._folder.state()["state"] == "finished"


async def test_a_service_that_hangs_is_killed_so_that_it_is_started_again(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(run.supervisor, "kill", killed.append)

    def answer() -> Status:
        if killed:
            return status(phase="ended", reason="done")
        raise DeadlineExceeded("no answer")

    async with asyncio.timeout(5.0):
        await run._follow(Service(answer))  # type: ignore[arg-type]
    assert killed == ["dataflow"]


async def test_only_steps_beyond_the_furthest_are_progress(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    steps = iter([1, 2, 1, 2, 3])
    monkeypatch.setattr("rillflow.runtime.local.POLL", 0.0)

    def answer() -> Status:
        now = next(steps)
        return status(steps=now, phase="ended" if now == 3 else "training")

    monkeypatch.setattr(run.supervisor, "progressed", lambda: told.append(1))
    await run._follow(Service(answer))  # type: ignore[arg-type]
    assert len(told) == 3


async def test_steps_of_every_policy_are_progress(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(run.supervisor, "progressed", lambda: told.append(1))
    for solver, checker in [(1, 0), (1, 1), (0, 1), (1, 1), (1, 2)]:
        run._note_progress(status(steps=solver, policies={"solver": policy(solver), "checker": policy(checker)}))
    assert len(told) == 3


def policy(steps: int) -> PolicyStatus:
    return PolicyStatus(
        version=steps, steps=steps, total_steps=9, reward=None, staleness=0.0, wait_fraction=0.0,
        samples_per_second=0.0, ready=0,
    )  # fmt: skip


class Recorded:
    """A supervisor that starts nothing."""

    def __init__(self) -> None:
        self.started: list[ProcessSpec] = []
        self.kept: set[str] = set()

    def start(self, spec: ProcessSpec) -> Any:
        self.started.append(spec)

    def check(self) -> None: ...

    def progressed(self) -> None: ...

    async def finish(self, seconds: float, keep: set[str]) -> None:
        self.kept = keep


async def recorded_run(folder: RunFolder, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a run of the recipe starts that ends at once."""
    run = LocalRun(folder, lambda status: None)
    run._recipe = recipe
    recorded: Any = Recorded()
    run.supervisor = recorded

    async def service() -> Any:
        return Service(lambda: status(phase="ended", reason="done"))

    monkeypatch.setattr(run, "_start_dataflow", service)
    await run._run()
    return recorded


async def test_a_colocated_run_has_no_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quickstart_colocated")
    recorded = await recorded_run(RunFolder.create(recipe, tmp_path), recipe, monkeypatch)
    assert [spec.name for spec in recorded.started] == ["unit-0", "trainer-agent"]


async def test_units_come_before_those_who_use_them_and_stay_until_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart", ["dataflow.units.count=2", "rollout.nodes=2"])
    two = {name: recipe.policies["agent"] for name in ("solver", "checker")}
    folder = RunFolder.create(recipe, tmp_path)
    recorded = await recorded_run(folder, recipe.model_copy(update={"policies": two}), monkeypatch)
    root = str(folder.root)
    assert [(spec.name, *spec.arguments) for spec in recorded.started] == [
        ("unit-0", "unit", root, "--name", "unit-0"),
        ("unit-1", "unit", root, "--name", "unit-1"),
        ("rollout-0", "rollout", root, "--name", "rollout-0"),
        ("rollout-1", "rollout", root, "--name", "rollout-1"),
        ("trainer-solver", "trainer", root, "--policy", "solver"),
        ("trainer-checker", "trainer", root, "--policy", "checker"),
    ]
    assert recorded.kept == {"dataflow", "unit-0", "unit-1"}
