"""The fork server with real processes: the state of a child, how ends are reported, and which process survives
which."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from rillflow.runtime import preloaded as module
from rillflow.runtime.preloaded import Forked, Preloaded
from rillflow.runtime.process import PARENT_ENV
from rillflow.runtime.supervisor import ProcessSpec, Supervisor
from rillflow.runtime.warm import early_server

pytestmark = pytest.mark.needs("fork")

TESTS = Path(__file__).parents[2]
SECONDS = 60.0
SLEEPER = "import time; time.sleep(600)"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - the operating system sends no event for this
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def made(folder: Path, *modules: str) -> Preloaded:
    preloaded = Preloaded(folder, folder / "forkserver.log", 1, modules)
    preloaded.begin()
    return preloaded


@pytest.fixture
async def preloaded(tmp_path: Path) -> AsyncIterator[Preloaded]:
    before = psutil.Process().children()  # other tests of this process may have left workers for the next ones
    preloaded = made(tmp_path, "numpy", "forked_code")
    yield preloaded
    await preloaded.close()
    assert set(psutil.Process().children()) <= set(before)


async def start(preloaded: Preloaded, code: str, log: Path, *more: str, **environment: str) -> Forked:
    async with asyncio.timeout(SECONDS):
        forked = await preloaded.start((code, *more), {"PATH": os.environ["PATH"], **environment}, log)
    assert forked is not None
    return forked


def server_of(forked: Forked) -> psutil.Process:
    parent = psutil.Process(forked.pid).parent()
    assert parent is not None
    return parent


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(75)", 75),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
async def test_codes_are_those_of_the_kernel(preloaded: Preloaded, tmp_path: Path, code: str, ended: int) -> None:
    forked = await start(preloaded, code, tmp_path / "log")
    async with asyncio.timeout(SECONDS):
        assert await forked.wait() == ended
    told = {"raise SystemExit('why')": "why", "1 / 0": "ZeroDivisionError"}.get(code, "")
    assert told in (tmp_path / "log").read_text()


async def test_a_child_is_like_a_process_of_its_own(preloaded: Preloaded, tmp_path: Path) -> None:
    code = """if True:
        import atexit, json, os, psutil, sys
        atexit.register(print, "at exit")
        print(json.dumps({
            "session": os.getsid(0), "pid": os.getpid(), "parent": os.getppid(), "environment": dict(os.environ),
            "stdin": os.path.realpath("/proc/self/fd/0"), "argv": sys.argv[2:],
            "title": psutil.Process().cmdline(), "open": sorted(os.listdir("/proc/self/fd"), key=int),
        }))
        print("an error", file=sys.stderr)
    """
    log = tmp_path / "log"
    log.write_text("before\n")
    forked = await start(preloaded, code, log, "/runs/mine", WORD="said")
    async with asyncio.timeout(SECONDS):
        assert await forked.wait() == 0
    # Output to a file is buffered unless PYTHONUNBUFFERED is set, errors are not.
    before, *said = log.read_text().splitlines()
    told, *rest = sorted(said, reverse=True)
    facts = json.loads(told)
    assert before == "before"
    assert rest == ["at exit", "an error"]
    assert facts["session"] == facts["pid"] == forked.pid
    assert facts["environment"] == {
        "PATH": os.environ["PATH"], "WORD": "said", PARENT_ENV: str(facts["parent"])
    }  # fmt: skip
    assert facts["stdin"] == os.devnull
    assert facts["argv"] == ["/runs/mine"]
    assert facts["title"][:3] == [sys.executable, "-m", "rillflow"]
    assert facts["title"][-1] == "/runs/mine"
    assert len(facts["open"]) == 4  # the fourth is the look itself


async def test_children_do_not_share_randomness(preloaded: Preloaded, tmp_path: Path) -> None:
    code = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    children = [await start(preloaded, code, tmp_path / f"log{number}") for number in range(2)]
    for child in children:
        await child.wait()
    first, second = ((tmp_path / f"log{number}").read_text().split() for number in range(2))
    assert not set(first) & set(second)


async def test_a_signal_reaches_the_group(preloaded: Preloaded, tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
    forked = await start(preloaded, code, tmp_path / "log")
    os.killpg(forked.pid, 0)  # from the first moment on
    leader = psutil.Process(forked.pid)
    await until(leader.children)
    (below,) = leader.children()
    os.killpg(forked.pid, signal.SIGKILL)
    assert await forked.wait() == -signal.SIGKILL
    await until(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE)


async def test_who_waits_no_more_leaves_no_process(preloaded: Preloaded, tmp_path: Path) -> None:
    waiting = asyncio.create_task(start(preloaded, SLEEPER, tmp_path / "log"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other = await start(preloaded, SLEEPER, tmp_path / "log")
    assert [child.pid for child in server_of(other).children()] in ([other.pid], [])
    await until(lambda: [child.pid for child in server_of(other).children()] == [other.pid])


async def test_a_killed_fork_server_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its children are killed, their codes are not known, and they are started again."""
    before = psutil.Process().children()
    supervisor = Supervisor(tmp_path, restarts=2, threads=1, preloaded=made(tmp_path, "forked_code"))
    process = supervisor.start(ProcessSpec("part", (SLEEPER,), heavy=True))
    await until(lambda: process.pid is not None)
    first = process.pid
    assert first is not None
    server = psutil.Process(first).parent()
    assert server is not None
    server.kill()
    await until(lambda: process.pid not in (None, first))
    assert process.pid is not None
    assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE
    again = psutil.Process(process.pid).parent()
    assert again is not None
    assert again.pid not in (server.pid, os.getpid())
    assert "was lost with the fork server" in caplog.text
    supervisor.check()
    await supervisor.stop()
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize("broken", ["there_is_no_such_module", "thread_beside"])
async def test_without_a_fork_server_processes_start_by_themselves(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server that cannot import, or must not fork, fails no run, and delays it only once."""
    supervisor = Supervisor(tmp_path, restarts=0, threads=1, preloaded=made(tmp_path, broken))
    process = supervisor.start(ProcessSpec("part", ("--help",), heavy=True))
    assert await supervisor.wait(SECONDS)
    supervisor.check()
    assert process.starts == 1
    assert "Usage" in process.log_path.read_text()
    await supervisor.stop()


async def test_a_fork_server_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPLACEMENTS", 1)
    preloaded = made(tmp_path, "forked_code")
    for _ in range(2):
        forked = await start(preloaded, SLEEPER, tmp_path / "log")
        server_of(forked).kill()
        assert await forked.wait() is None
        assert forked.lost
    assert await preloaded.start((SLEEPER,), {}, tmp_path / "log") is None
    await preloaded.close()


def test_all_end_with_the_supervisor(tmp_path: Path) -> None:
    """Also when it is killed, and has no time to end them."""
    code = f"""if True:
        import asyncio
        from pathlib import Path
        from rillflow.runtime.preloaded import Preloaded

        async def main():
            preloaded = Preloaded(Path({str(tmp_path)!r}), Path({str(tmp_path / "log")!r}), 1, ["forked_code"])
            preloaded.begin()
            forked = await preloaded.start(({SLEEPER!r},), {{}}, Path({str(tmp_path / "log")!r}))
            print(forked.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    child = psutil.Process(int(supervisor.stdout.readline()))
    server = child.parent()
    assert server is not None
    supervisor.kill()
    supervisor.communicate()
    _, alive = psutil.wait_procs([server, child], timeout=SECONDS)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def test_an_early_server_is_taken_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the block that started it, forks what the run asks for, and ends with the run. Its log begins with
    what it said before it had one."""
    monkeypatch.setenv("RILLFLOW_WARM", "")
    log_path = tmp_path / "forkserver.log"
    with early_server(wanted=True, modules=("this", "forked_code")) as early:
        assert early is not None
        preloaded = Preloaded(tmp_path, log_path, 1, ("numpy",), early)
        preloaded.begin()
        forked = await start(preloaded, "import sys; sys.exit(3 if 'this' in sys.modules else 4)", tmp_path / "log")
    assert server_of(forked).pid == early.process.pid
    assert await forked.wait() == 3
    assert early.process.poll() is None
    await preloaded.close()
    assert early.process.poll() is not None
    assert log_path.read_text().startswith("The Zen of Python")


def test_an_early_server_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RILLFLOW_WARM", "")
    with early_server(wanted=True, modules=("this",)) as early:
        assert early is not None
    assert early.process.poll() is not None
    with early_server(wanted=False) as none:
        assert none is None
