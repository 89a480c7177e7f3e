"""The warm process with real processes: which requests it serves and refuses, and which process survives which."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from commands import wait_until
from rillflow.errors import RunError
from rillflow.runtime import warm
from rillflow.runtime.preloaded import Preloaded
from rillflow.runtime.warm import server_environment

pytestmark = pytest.mark.needs("fork")

TESTS = Path(__file__).parents[2]
# It imports numpy only, whose import is as safe before a fork as torch's and takes a tenth of the time.
PROGRAM = "from rillflow.runtime import warm; warm.MODULES = ('numpy', 'forked_code'); warm.main()"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setenv(warm.PATH_ENV, f"{folder}/socket")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])))
        yield Path(folder) / "socket"


@pytest.fixture
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    started = subprocess.Popen(command, env=server_environment(0), stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline().startswith("ready")
    yield started
    started.kill()
    started.communicate(timeout=60)


async def test_a_run_is_served_by_a_fork_that_ends_with_it(
    process: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preloaded = Preloaded(tmp_path, tmp_path / "forkserver.log", 1, ("numpy",))
    preloaded.begin()
    code = "import os, sys; print(os.getppid(), os.getcwd(), sys.path[0], os.environ['WORD']); sys.exit(7)"
    async with asyncio.timeout(60):
        forked = await preloaded.start((code,), {"WORD": "said"}, tmp_path / "log")
        assert forked is not None
        assert await forked.wait() == 7
    parent, *seen = (tmp_path / "log").read_text().split()
    assert seen == [str(tmp_path), str(tmp_path), "said"]
    server = psutil.Process(int(parent))
    assert server.ppid() == process.pid
    assert os.getsid(server.pid) == server.pid
    async with asyncio.timeout(60):
        await preloaded.close()
    assert not server.is_running()
    assert process.poll() is None


async def test_runs_survive_the_warm_process(process: subprocess.Popen[str], tmp_path: Path) -> None:
    preloaded = Preloaded(tmp_path, tmp_path / "forkserver.log", 1, ("numpy",))
    preloaded.begin()
    async with asyncio.timeout(60):
        first = await preloaded.start(("pass",), {}, tmp_path / "log")
        assert first is not None
        process.kill()
        process.wait(60)
        second = await preloaded.start(("import sys; sys.exit(5)",), {}, tmp_path / "log")
        assert second is not None
        assert await second.wait() == 5
        await preloaded.close()


def refusal(caplog: pytest.LogCaptureFixture, tmp_path: Path, **changes: str) -> str:
    ours, its = socket.socketpair()
    caplog.clear()
    with ours, its, caplog.at_level(logging.INFO):
        assert warm.fork_server(its, server_environment(1) | changes, tmp_path / "log") is None
    return caplog.text


def test_whom_it_must_not_serve_it_refuses_by_name(
    process: subprocess.Popen[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "other values of HF_HOME, PYTHONHASHSEED" in refusal(caplog, tmp_path, HF_HOME="/x", PYTHONHASHSEED="7")
    with monkeypatch.context() as patch:
        patch.setattr(warm, "packages_changed", lambda: {"/site-packages": 1})
        assert "packages were installed since it started: start it again" in refusal(caplog, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "prefix", "/another")
        assert f"it runs {sys.executable}" in refusal(caplog, tmp_path)
    with socket.socket(socket.AF_UNIX) as client:  # invalid requests do not end it
        client.connect(os.environ[warm.PATH_ENV])
        client.sendall(b"hello\n")
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert process.poll() is None


def test_there_is_one_at_a_time_and_a_dead_one_is_replaced(process: subprocess.Popen[str], path: Path) -> None:
    with pytest.raises(RunError, match="a warm process listens at"):
        warm.listen()
    process.kill()
    process.wait(60)
    assert path.exists()
    warm.listen().close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_ends_quietly_when_interrupted(process: subprocess.Popen[str], path: Path) -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    wait_until(lambda: not path.exists(), "its socket to be removed")


def test_without_one_and_switched_off_there_is_nothing_to_ask(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(caplog, tmp_path) == ""
    monkeypatch.setenv(warm.PATH_ENV, "")
    assert refusal(caplog, tmp_path) == ""
    with pytest.raises(RunError, match="turns warm processes off"):
        warm.listen()
    path.touch()
    monkeypatch.setenv(warm.PATH_ENV, str(path))
    assert "does not answer" in refusal(caplog, tmp_path)


def test_a_command_runs_in_a_fork_with_the_streams_of_its_caller(
    process: subprocess.Popen[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; print(os.getppid(), os.getcwd()); print('error', file=sys.stderr); sys.exit(7)"
    assert warm.run_in_fork([code], print) == 7
    said = capfd.readouterr()
    assert said.out.split() == [str(process.pid), str(tmp_path)]
    assert said.err == "error\n"
    assert warm.run_in_fork(["raise ValueError('broken')"], print) == 1
    assert "ValueError: broken" in capfd.readouterr().err
    process.kill()
    process.wait(60)
    told: list[str] = []
    assert warm.run_in_fork([code], told.append) is None
    assert "does not answer" in told[0]


def test_a_command_in_a_fork_is_interrupted_with_its_caller(process: subprocess.Popen[str]) -> None:
    code = (
        "import sys, time\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    sys.exit(130)\n"
    )
    program = f"import sys; from rillflow.runtime import warm; sys.exit(warm.run_in_fork([{code!r}], print))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "begun\n"
        caller.send_signal(signal.SIGINT)
        assert caller.communicate(timeout=60)[0] == "interrupted\n"
    assert caller.returncode == 130
