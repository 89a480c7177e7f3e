"""A run's supervisor without its processes: signals, a service that hangs, and what is written down at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rillflow.config import load_recipe
from rillflow.errors import BadRequest, DeadlineExceeded, RunError, Unavailable
from rillflow.resources.placement import Placed
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import LocalRun, ended_well
from rillflow.runtime.process import signals_held
from rillflow.runtime.supervisor import ProcessSpec, Supervised
from rillflow.storage.startup import Stage, Starting, stage_path
from rillflow.types import Ack, EngineInfo, Engines, LookEngines, PolicyStatus, RetireNode, Status


class Service:
    """Answers as `answer` says."""

    def __init__(self, answer: Callable[[], Status]) -> None:
        self._answer = answer
        self.asked = 0

    async def engines(self, ask: LookEngines) -> Engines:
        """An engine that has joined the run, until it has learnt of the end."""
        self.asked += 1
        return Engines(engines=[] if self.asked > 2 else [EngineInfo("far", "http://127.0.0.1:1", {}, 64, 1)])

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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRun:
    recipe = load_recipe("quickstart", ["runtime.start_timeout=0.001"])
    run = LocalRun(RunFolder.create(recipe, tmp_path), lambda status: None)
    monkeypatch.setattr(run._workers, "look", lambda: None)  # nothing has begun
    return run


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the caller of the tests ignores it
    yield
    signal.signal(signal.SIGHUP, before)


async def forever() -> Status:
    await asyncio.sleep(600)
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
    async with asyncio.timeout(60):
        assert await run.run() is None
    assert run._folder.state()["state"] == "stopped"


async def test_a_signal_before_the_run_listens_is_not_lost(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_run", forever)
    with signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
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

    async with asyncio.timeout(60):
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
    """A supervisor that starts nothing; `failing` are processes that cannot be kept alive."""

    def __init__(self) -> None:
        self.started: list[ProcessSpec] = []
        self.processes: list[Supervised] = []
        self.kept: set[str] = set()
        self.failing: dict[str, BaseException] = {}
        self.gone: set[str] = set()
        self.forgotten: list[str] = []
        self.let_gone: list[tuple[str, float]] = []
        self.stopped: list[tuple[str, float]] = []

    def start(self, spec: ProcessSpec) -> Any:
        self.started.append(spec)

    def failures(self) -> dict[str, BaseException]:
        return dict(self.failing)

    def finished(self) -> set[str]:
        return set(self.gone)

    def forget(self, name: str) -> None:
        self.failing.pop(name, None)
        self.gone.discard(name)
        self.forgotten.append(name)

    def progressed(self) -> None: ...

    async def finish(self, seconds: float, keep: set[str]) -> None:
        self.kept = keep

    async def let_go(self, name: str, seconds: float) -> bool:
        self.let_gone.append((name, seconds))
        return seconds > 0

    async def stop_one(self, name: str, grace: float) -> None:
        self.stopped.append((name, grace))

    async def stop(self) -> None: ...


async def recorded_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, service: Any = None
) -> tuple[LocalRun, Recorded]:
    """The processes of a run that ends at once, or when `service` says so."""
    run = LocalRun(folder, lambda status: None)
    recorded: Any = Recorded()
    run.supervisor = recorded

    async def start() -> Any:
        return service or Service(lambda: status(phase="ended", reason="done"))

    monkeypatch.setattr(run, "_start_dataflow", start)
    monkeypatch.setattr("rillflow.runtime.local.POLL", 0.0)
    if service is None:
        await run._run()
    return run, recorded


async def test_a_colocated_run_has_no_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(load_recipe("quickstart_colocated"), tmp_path)
    _, recorded = await recorded_run(folder, monkeypatch)
    assert [spec.name for spec in recorded.started] == ["unit-0", "trainer-agent"]


async def test_units_come_before_those_who_use_them_and_stay_until_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart", ["dataflow.units.count=2", "rollout.nodes=2"])
    two = {name: recipe.policies["agent"] for name in ("solver", "checker")}
    folder = RunFolder.create(recipe.model_copy(update={"policies": two}), tmp_path)
    _, recorded = await recorded_run(folder, monkeypatch)
    root = str(folder.root)
    assert [(spec.name, *spec.arguments) for spec in recorded.started] == [
        ("unit-0", "unit", root, "--name", "unit-0"),
        ("unit-1", "unit", root, "--name", "unit-1"),
        ("trainer-solver", "trainer", root, "--policy", "solver"),
        ("trainer-checker", "trainer", root, "--policy", "checker"),
        ("rollout-0", "rollout", root, "--name", "rollout-0"),
        ("rollout-1", "rollout", root, "--name", "rollout-1"),
    ]
    assert recorded.kept == {"dashboard", "dataflow", "unit-0", "unit-1"}


async def test_the_run_goes_on_without_a_node_but_not_without_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(load_recipe("quickstart", ["rollout.nodes=2"]), tmp_path)
    dying = iter(["rollout-0", None, "rollout-1", None])
    failing: dict[str, BaseException] = {}

    def answer() -> Status:
        if victim := next(dying):
            failing[victim] = RunError(f"{victim} ended for the 6. time")
        return status()

    run, recorded = await recorded_run(folder, monkeypatch, Service(answer))
    recorded.failing = failing

    with pytest.raises(RunError, match="rollout-1 ended"):
        await run._run()
    assert recorded.forgotten == ["rollout-0"]
    assert {worker.name: worker.lost for worker in folder.workers.read()} == {
        "trainer-agent": False, "rollout-0": True, "rollout-1": False,
    }  # fmt: skip
    assert not any(worker.lost for worker in folder.workers.prepare(folder.recipe)), "a resumed run tries it again"


async def test_a_maintainer_that_cannot_be_kept_alive_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(load_recipe("quickstart", ["resources.scaling.enabled=true"]), tmp_path)
    phases = iter([status(), status(), status(phase="ended", reason="done")])
    run, recorded = await recorded_run(folder, monkeypatch, Service(lambda: next(phases)))
    recorded.failing["maintainer"] = RunError("maintainer ended")
    await run._run()
    assert recorded.forgotten == ["maintainer"]
    assert recorded.started[-1].arguments == ("maintain", str(folder.root))


async def test_a_node_that_somebody_retired_leaves_its_worker_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(load_recipe("quickstart", ["rollout.nodes=2"]), tmp_path)
    phases = iter([status(), status(), status(), status(phase="ended", reason="done")])
    run, recorded = await recorded_run(folder, monkeypatch, Service(lambda: next(phases)))
    recorded.gone = {"rollout-1"}
    await run._run()
    assert recorded.forgotten == ["rollout-1"]
    assert [worker.name for worker in folder.workers.read() if worker.lost] == ["rollout-1"]


class Retiring:
    """A service that records the nodes to retire."""

    def __init__(self, answers: list[Exception | None]) -> None:
        self.answers = answers
        self.asked: list[RetireNode] = []

    async def retire(self, ask: RetireNode, deadline: float) -> Ack:
        self.asked.append(ask)
        if (error := self.answers.pop(0)) is not None:
            raise error
        return Ack(accepted=True)


@pytest.mark.parametrize(
    ("answers", "patience"),
    [([None], 10.0), ([Unavailable("restarting"), None], 10.0), ([BadRequest("no such node")], 0.0)],
    ids=["drains", "is told again", "had not joined yet"],
)
async def test_a_node_that_loses_its_tag_is_retired_through_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Exception | None], patience: float
) -> None:
    folder = RunFolder.create(load_recipe("quickstart", ["resources.scaling.drain=7"]), tmp_path)
    run, recorded = await recorded_run(folder, monkeypatch, Service(status))
    service: Any = Retiring(list(answers))
    run._client = service
    await run.retire(Placed("rollout-0", "rollout"))
    assert service.asked == [RetireNode(node="rollout-0", drain=7.0)] * len(answers)
    assert recorded.let_gone == [("rollout-0", patience)]
    assert [name for name, _ in recorded.stopped] == ([] if patience else ["rollout-0"])


def supervised(folder: RunFolder, name: str, began: float) -> Supervised:
    process = Supervised(ProcessSpec(name, ()), folder.log(name), restarts=0, threads=0)
    process.began = began
    return process


async def test_who_waits_for_a_run_is_told_what_has_not_started_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart", ["resources.scaling.enabled=true"])
    folder = RunFolder.create(recipe, tmp_path)
    phases = iter([status(), status(phase="ended", reason="done")])
    run, recorded = await recorded_run(folder, monkeypatch, Service(lambda: next(phases)))
    told: list[list[Starting]] = []
    run._on_starting = told.append
    began = time.time() - 20.0
    recorded.processes = [
        supervised(folder, name, began) for name in ("dataflow", "rollout-0", "trainer-agent", "maintainer")
    ]
    (folder.root / "starting").mkdir()
    for name, stage in (("dataflow", Stage("ready", began + 1)), ("trainer-agent", Stage("loading", began + 15))):
        stage_path(folder.root, name).write_bytes(msgspec.json.encode(stage))
    await run._run()
    assert len(told) == 2
    node, trainer = told[0]
    assert (node.process, node.doing) == ("rollout-0", "starting the process")
    assert (trainer.process, trainer.doing) == ("trainer-agent", "loading")
    assert node.seconds >= 20.0 > trainer.seconds >= 5.0


async def test_a_start_is_shown_before_the_service_answers(tmp_path: Path) -> None:
    told: list[list[Starting]] = []
    recipe = load_recipe("quickstart", ["runtime.start_timeout=0.2"])
    run = LocalRun(RunFolder.create(recipe, tmp_path), lambda status: None, on_starting=told.append)
    supervisor: Any = run.supervisor
    process = supervised(run._folder, "dataflow", time.time())
    supervisor.start = lambda spec: process
    supervisor._running = {process: asyncio.get_running_loop().create_future()}
    with pytest.raises(RunError, match="did not start in time"):
        await run._start_dataflow()
    assert {(part.process, part.doing) for parts in told for part in parts} == {("dataflow", "starting the process")}


@pytest.mark.parametrize(
    ("reason", "steps", "well"),
    [
        ("done", 3, True),
        ("done", 0, False),
        ("target reached", 0, True),
        ("target reached", 3, True),
        ("stopped", 3, False),
    ],
)
def test_a_run_that_reached_its_target_ended_well(reason: str, steps: int, well: bool) -> None:
    assert ended_well(status(phase="ended", reason=reason, steps=steps)) == well
