"""The supervisor keeps processes alive, within bounds; a port on demand starts its process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from rillflow.errors import RunError
from rillflow.runtime import supervisor as module
from rillflow.runtime.preloaded import Preloaded
from rillflow.runtime.process import GIVE_UP
from rillflow.runtime.supervisor import OnDemand, ProcessSpec, Supervised, Supervisor

SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', %r]); time.sleep(600)" % SLEEPER  # noqa: UP031


@pytest.fixture(params=["plain", pytest.param("forked", marks=pytest.mark.needs("fork"))])
async def supervisor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Supervisor]:
    """Runs code instead of `rillflow …`, with short pauses: by `python -c`, or by a fork server."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    if request.param == "plain":
        original = asyncio.create_subprocess_exec

        async def python(
            executable: str, flag: str, name: str, code: str, **options: object
        ) -> asyncio.subprocess.Process:
            return await original(sys.executable, "-c", code, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", python)
        yield Supervisor(tmp_path, restarts=2, threads=1, grace=0.5)
        return
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    preloaded = Preloaded(tmp_path, tmp_path / "forkserver.log", 1, ["forked_code"])
    preloaded.begin()
    yield Supervisor(tmp_path, restarts=2, threads=1, grace=0.5, preloaded=preloaded)
    await preloaded.close()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the operating system sends no event for this
            await asyncio.sleep(0.01)


def spec(code: str, name: str = "part") -> ProcessSpec:
    return ProcessSpec(name, (code,), heavy=True)


def family(process: Supervised) -> list[psutil.Process]:
    assert process.pid is not None
    leader = psutil.Process(process.pid)
    return [leader, *leader.children(recursive=True)]


async def test_a_killed_process_is_started_again(supervisor: Supervisor) -> None:
    process = supervisor.start(spec(SLEEPER))
    await until(lambda: process.pid is not None)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.pid not in (None, first))
    supervisor.check()
    await supervisor.stop()


async def test_a_process_that_keeps_dying_ends_the_run_with_its_log(supervisor: Supervisor) -> None:
    process = supervisor.start(spec("raise SystemExit('no luck today')"))
    await supervisor.wait(60)
    with pytest.raises(RunError, match="no luck today"):
        supervisor.check()
    assert process.starts == 3
    await supervisor.stop()


async def test_a_process_that_finished_is_left_alone(supervisor: Supervisor) -> None:
    process = supervisor.start(spec("pass"))
    assert await supervisor.wait(60)
    assert process.starts == 1
    supervisor.check()
    await supervisor.stop()


@pytest.mark.parametrize("code", [SLEEPER, STUBBORN, PARENT])
async def test_stop_leaves_none_behind(supervisor: Supervisor, code: str) -> None:
    process = supervisor.start(spec(code))
    members = 2 if code is PARENT else 1
    await until(lambda: process.pid is not None and len(family(process)) == members)
    if code is STUBBORN:
        await until(lambda: "up" in process.log_path.read_text())
    people = family(process)
    await supervisor.stop()
    await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in people))


async def test_stop_during_a_restart_pause(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 600.0)
    process = supervisor.start(spec("raise SystemExit(1)"))
    await until(lambda: process.starts == 1 and process.pid is None)
    async with asyncio.timeout(60):
        await supervisor.stop()


async def test_what_a_dead_process_had_started_goes_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    note = tmp_path / "children"
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); "
        f"print(child.pid, file=open({str(note)!r}, 'a')); sys.exit(1)"
    )
    supervisor.start(spec(code))
    await supervisor.wait(60)
    children = [int(line) for line in note.read_text().split()]
    assert len(children) == 3
    await until(lambda: not any(alive(pid) for pid in children))
    await supervisor.stop()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def kill_and_see_it_again(process: Supervised) -> None:
    await until(lambda: process.pid is not None)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.pid not in (None, first))


async def test_deaths_of_long_ago_are_forgotten_while_the_run_gets_on(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED", 0.0)
    process = supervisor.start(spec(SLEEPER))
    for _ in range(4):
        await kill_and_see_it_again(process)
        supervisor.progressed()
    supervisor.check()
    await supervisor.stop()


@pytest.mark.parametrize("why", ["no progress", "died too soon"])
async def test_deaths_count_without_progress_or_when_they_come_soon(supervisor: Supervisor, why: str) -> None:
    process = supervisor.start(spec(SLEEPER))
    for _ in range(2):
        await kill_and_see_it_again(process)
        if why == "died too soon":
            supervisor.progressed()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await supervisor.wait(60)
    with pytest.raises(RunError, match="for the 3"):
        supervisor.check()
    await supervisor.stop()


async def test_a_process_that_says_it_is_no_use_is_not_started_again(supervisor: Supervisor) -> None:
    process = supervisor.start(spec(f"raise SystemExit({GIVE_UP})"))
    await supervisor.wait(60)
    with pytest.raises(RunError, match="part"):
        supervisor.check()
    assert process.starts == 1
    await supervisor.stop()


async def test_nothing_is_started_again_once_the_run_has_ended(supervisor: Supervisor) -> None:
    kept, done = supervisor.start(spec(SLEEPER, "dataflow")), supervisor.start(spec(SLEEPER, "other"))
    await until(lambda: kept.pid is not None and done.pid is not None)
    ending = asyncio.create_task(supervisor.finish(60.0, keep={"dataflow"}))
    await asyncio.sleep(0)
    assert done.pid is not None
    os.kill(done.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await ending
    assert done.starts == 1
    supervisor.check()
    assert kept.pid is not None
    await supervisor.stop()


async def test_a_process_that_is_let_go_ends_by_itself_and_is_not_started_again(supervisor: Supervisor) -> None:
    process = supervisor.start(spec(SLEEPER))
    await until(lambda: process.pid is not None)
    assert not await supervisor.let_go("part", 0.05), "it has not ended yet"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await supervisor.let_go("part", 60.0)
    assert process.starts == 1
    assert list(supervisor.processes) == []


@pytest.mark.parametrize("code", [SLEEPER, STUBBORN])
async def test_one_process_is_stopped_and_the_others_stay(supervisor: Supervisor, code: str) -> None:
    stays, goes = supervisor.start(spec(SLEEPER, "stays")), supervisor.start(spec(code, "goes"))
    await until(lambda: stays.pid is not None and goes.pid is not None)
    if code is STUBBORN:
        await until(lambda: "up" in goes.log_path.read_text())
    people = family(goes)
    await supervisor.stop_one("goes", 0.3)
    await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in people))
    assert goes.starts == 1
    assert list(supervisor.processes) == [stays]
    assert supervisor.failures() == {}
    assert stays.pid is not None
    await supervisor.stop()


async def test_one_that_waits_for_its_next_life_is_stopped_too(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 600.0)
    process = supervisor.start(spec("raise SystemExit(1)"))
    await until(lambda: process.starts == 1 and process.pid is None)
    async with asyncio.timeout(60):
        await supervisor.stop_one("part", 3.0)
    assert list(supervisor.processes) == []


async def test_who_finished_and_who_failed_are_told_apart_and_can_be_forgotten(supervisor: Supervisor) -> None:
    supervisor.start(spec("pass", "done"))
    supervisor.start(spec(f"raise SystemExit({GIVE_UP})", "failed"))
    await supervisor.wait(60)
    assert supervisor.finished() == {"done"}
    assert supervisor.failures().keys() == {"failed"}
    supervisor.forget("failed")
    supervisor.check()
    supervisor.forget("done")
    assert list(supervisor.processes) == []


def test_a_process_that_is_forked_waits_for_imports_first(tmp_path: Path) -> None:
    preloaded = Preloaded(tmp_path, tmp_path / "log", 1)
    first = {
        heavy: Supervised(ProcessSpec("part", (), heavy=heavy), tmp_path / "log", 1, 1, preloaded).first_stage
        for heavy in (True, False)
    }
    assert first == {True: "importing torch", False: "starting the process"}


# Serves one connection on the socket that it is given.
SERVER = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.setblocking(True)
connection, _ = listener.accept()
connection.sendall(b"here")
"""


async def test_the_first_connection_starts_the_process_which_answers_it() -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    port = OnDemand(started.put_nowait)
    await asyncio.sleep(0.05)
    assert started.empty()
    host, number = port.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    async with asyncio.timeout(60):
        handle = await started.get()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, str(handle), pass_fds=(handle,), env={**os.environ}
        )
        assert await reader.read() == b"here"
        await process.wait()
    assert started.empty()
    writer.close()
    port.close()


async def test_a_port_that_is_taken_is_replaced_and_a_closed_one_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        port = OnDemand(lambda handle: None, taken)
        number = int(port.url.rsplit(":", 1)[1])
        assert number != taken
    port.close()
    port.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", number)) != 0
