"""The supervisor with real processes: restarts, limits, and none left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rillflow.errors import RunError
from rillflow.runtime import supervisor as module
from rillflow.runtime.supervisor import ProcessSpec, Supervised, Supervisor

SLEEPER = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', %r]); time.sleep(60)" % SLEEPER  # noqa: UP031


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Runs `python -c CODE` instead of `python -m rillflow …`, with short pauses."""
    original = asyncio.create_subprocess_exec

    async def python(executable: str, flag: str, name: str, code: str, **options: object) -> asyncio.subprocess.Process:
        return await original(sys.executable, "-c", code, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", python)
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    return Supervisor(tmp_path, restarts=2, threads=1, grace=0.5)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the operating system sends no event for this
            await asyncio.sleep(0.01)


def spec(code: str, name: str = "part") -> ProcessSpec:
    return ProcessSpec(name, (code,))


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
    await supervisor.wait(10.0)
    with pytest.raises(RunError, match="no luck today"):
        supervisor.check()
    assert process.starts == 3
    await supervisor.stop()


async def test_a_process_that_finished_is_left_alone(supervisor: Supervisor) -> None:
    process = supervisor.start(spec("pass"))
    assert await supervisor.wait(10.0)
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
    await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in people), 5.0)


async def test_stop_during_a_restart_pause(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 60.0)
    process = supervisor.start(spec("raise SystemExit(1)"))
    await until(lambda: process.starts == 1 and process.pid is None)
    async with asyncio.timeout(5.0):
        await supervisor.stop()
