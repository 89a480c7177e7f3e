"""Programs and their results, the pool, and that nothing outlives what started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest

from rillflow.agents.sandbox import Asserts, Case, Cases, Pairs, Result, Sandbox, SandboxConfig, close_shared, shared
from rillflow.agents.sandbox import running as grading
from rillflow.agents.sandbox.box import Box, Cell
from rillflow.agents.sandbox.running import Pool
from rillflow.errors import SandboxError

_PATIENCE = 60.0


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("print('hello')", "ok", 0),
        ("1 / 0", "error", 1),
        ("import sys\nsys.exit(3)", "exit", 3),
        ("import os\nos._exit(0)", "exit", 0),
        ("held = bytearray(8 << 30)", "memory", 1),
        ("import os\nos.kill(os.getpid(), 11)\nimport ctypes\nctypes.string_at(0)", "killed", -11),
        ("while True: print('x' * 1000)", "output", -9),
        ("import os\nos.closerange(3, 100)", "exit", 1),
    ],
)
def test_a_program_ends_as_it_ends(sandbox: Sandbox, code: str, status: str, exit_code: int) -> None:
    result = sandbox.run_sync(code)
    assert (result.status, result.code) == (status, exit_code), result


def test_a_program_past_its_time_is_ended(sandbox: Sandbox) -> None:
    hangs = "import time\ntime.sleep(1000)"
    lingers = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nprint('seen')"
    late = sandbox.run_sync(hangs, seconds=0.5)
    assert late.status == "timeout"
    assert late.code == -signal.SIGKILL
    assert sandbox.run_sync(lingers, seconds=30).stdout == "seen\n"


def test_a_program_gets_its_input_and_files_and_shows_its_last_value(sandbox: Sandbox) -> None:
    code = (
        "import helper, sys\nprint(sys.stdin.read().upper() * 1, file=sys.stderr)\nhelper.twice(open('data/a').read())"
    )
    files = {"helper.py": "def twice(x):\n    return x + x\n", "data/a": "ab"}
    result = sandbox.run_sync(code, stdin="é" * 100_000, files=files)
    assert (result.value == "'abab'" and len(result.stderr) == 65536 // 2) or result.status == "output"
    small = sandbox.run_sync(code, stdin="é", files=files)
    assert (small.value, small.stderr, small.status) == ("'abab'", "É\n", "ok")


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../b", ""])
def test_files_stay_in_their_folder(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(SandboxError, match="not a valid file name"):
        sandbox.run_sync("1", files={name: "x"})


def test_a_traceback_shows_the_program_and_not_the_machinery(sandbox: Sandbox) -> None:
    result = sandbox.run_sync("def f():\n    raise ValueError('why')\nf()")
    assert "ValueError: why" in result.stderr
    assert 'File "program.py", line 2' in result.stderr
    assert "inside" not in result.stderr


def test_nothing_is_left_for_the_next_run(sandbox: Sandbox) -> None:
    leave = "import builtins, math\nbuiltins.left = math.pi = 3\nopen('/tmp/left', 'w').close()"
    look = "import builtins, math, os\n"
    look += "(hasattr(builtins, 'left'), math.pi == 3, os.listdir('/tmp'), os.listdir('/dev/shm'))"
    for _ in range(sandbox.config.pool + 2):
        assert sandbox.run_sync(leave).status == "ok"
        assert sandbox.run_sync(look).value == "(False, False, [], [])"


def test_the_same_code_gives_the_same_result(sandbox: Sandbox) -> None:
    assert len({sandbox.run_sync("list({'a', 'b', 'c', 'd'})").value for _ in range(3)}) == 1


@pytest.mark.needs("bubblewrap")
def test_more_runs_than_turns_wait_and_all_end() -> None:

    async def many() -> None:
        async with Sandbox(SandboxConfig(pool=2, running=2)) as opened:
            results = await asyncio.gather(*(opened.run(f"print({number})", seconds=60) for number in range(12)))
            assert [result.stdout for result in results] == [f"{number}\n" for number in range(12)]

    asyncio.run(many())


@pytest.mark.needs("bubblewrap")
def test_who_waits_too_long_for_a_turn_is_told_and_a_cancelled_run_gives_its_turn_back() -> None:

    async def crowded() -> None:
        async with Sandbox(SandboxConfig(pool=1, running=1, wait=0.2)) as opened:
            long = asyncio.create_task(opened.run("import time\ntime.sleep(1000)", seconds=900))
            await asyncio.sleep(0)
            with pytest.raises(SandboxError, match="no turn"):
                await opened.run("1")
            long.cancel()
            deadline = time.monotonic() + _PATIENCE
            while True:
                try:
                    assert (await opened.run("1")).status == "ok"
                    return
                except SandboxError:
                    assert time.monotonic() < deadline

    asyncio.run(crowded())


@pytest.mark.needs("bubblewrap")
def test_a_first_process_that_died_is_no_verdict_and_is_started_again() -> None:

    async def broken() -> None:
        async with Sandbox(SandboxConfig(pool=1)) as opened:
            assert opened._pool is not None
            code = "import time\ndef f():\n    time.sleep(1000)"
            grading = asyncio.create_task(opened.grade(code, Asserts(("assert f()",)), seconds=900))
            while not grading.done():  # also before it has begun, which only starts another
                opened._pool._cell._process.kill()
                await asyncio.sleep(0.1)
            with pytest.raises(SandboxError):
                await grading
            assert (await opened.run("1", seconds=60)).status == "ok"

    asyncio.run(broken())


def test_tests_that_leave_give_no_verdict(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="ended their own process"):
        sandbox.grade_sync("def f(x): return 1", Asserts(("import os; os._exit(0)",)))


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("encode = property\ndef decode(x): return x", "assert decode(encode('a')) == 'a'"),
        ("encode = super\ndef decode(x): return x", "assert decode(encode('a')) == 'a'"),
        ("def decode(x): return x", "assert decode(lambda: 1) == 1"),
    ],
)
def test_what_cannot_cross_the_border_scores_nothing(sandbox: Sandbox, code: str, test: str) -> None:
    """Also where a candidate names a builtin type as what the tests call."""
    graded = sandbox.grade_sync(code, Asserts((test, "assert decode('a') == 'a'")))
    assert graded.cases == (False, True)
    assert graded.cause.startswith("test 1: ")


@pytest.mark.needs("bubblewrap")
def test_closing_ends_everything_and_using_it_afterwards_is_an_error() -> None:
    opened = Sandbox().open()
    assert opened.run_sync("1").status == "ok"
    assert opened._pool is not None
    first = opened._pool._cell._process.pid
    inside = [first, *_descendants(first)]
    opened.close()
    opened.close()
    _wait_until_gone(inside)
    with pytest.raises(SandboxError, match="not open"):
        opened.run_sync("1")


@pytest.mark.parametrize("isolation", [pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")), "process"])
def test_closing_ends_what_runs_with_an_error_that_says_so(isolation: Literal["bubblewrap", "process"]) -> None:

    async def closed_early() -> None:
        opened = await asyncio.to_thread(Sandbox(SandboxConfig(isolation=isolation, pool=1)).open)
        long = asyncio.create_task(opened.run("import time\ntime.sleep(1000)", seconds=900))
        await asyncio.sleep(0)
        await asyncio.to_thread(opened.close)
        with pytest.raises(SandboxError):
            await long

    asyncio.run(closed_early())


def test_text_that_is_no_text_is_a_failure_of_the_program_only(sandbox: Sandbox) -> None:
    assert sandbox.run_sync("print('\ud800')", stdin="\ud800", files={"a": "\ud800"}).status == "error"
    assert not sandbox.grade_sync("x = '\ud800'\0", Asserts(("assert x",))).ok
    with pytest.raises(SandboxError, match="cannot be sent"):
        sandbox.grade_sync("f = 1", Cases((Case("f", (object(),), 1),)))


def test_cases_are_compared_as_plain_values(sandbox: Sandbox) -> None:
    cases = Cases((Case("f", (1,), [2, (3,)], {"y": 2}), Case("f", (2,), [0]), Case("g", (), 1)))
    verdict = sandbox.grade_sync("def f(x, y=0):\n    return [x + 1, (y + 1,)]\n", cases)
    assert verdict.cases == (True, False, False)


def test_tests_see_the_attributes_and_the_exceptions_that_the_candidate_made(sandbox: Sandbox) -> None:
    code = "class Thing:\n    number, _ask = 7, 8\n    def __init__(self): self.keep = 9\n"
    code += "def read(data): return data.decode()\ndef group(): raise ExceptionGroup('two', [ValueError()])\n"
    code += "def parse(text): return compile(text, 'x', 'exec')\ndef items(): return (n for n in [1, 2])\n"
    raises = "try:\n    {}\nexcept {} as error:\n    assert {} in str(error.args)\nelse:\n    assert False"
    tests = (
        "thing = Thing()\nassert (thing.number, thing._ask, thing.keep) == (7, 8, 9)",
        "thing.number = 3\nassert thing.number == 3",
        raises.format("read(b'\\xff')", "UnicodeDecodeError", "'invalid start byte'"),
        raises.format("parse('(')", "SyntaxError", "'never closed'"),
        raises.format("group()", "Exception", "'two'"),
        "assert list(items()) == [1, 2]",
    )
    verdict = sandbox.grade_sync(code, Asserts(tests))
    assert verdict.ok, verdict


async def test_waiting_for_a_turn_is_not_the_programs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    async def run(pool: object, code: str, stdin: str, seconds: float, files: object) -> Result:
        given.append(seconds)
        await asyncio.sleep(0.05)  # others have their turn
        return Result(stdin, "", None, "ok", 0, taken)

    monkeypatch.setattr(grading, "run_program", run)
    pairs, pool = Pairs((("a", "a"),) * 4), Mock(spec=Pool)
    taken = 0.01
    assert (await grading.grade(pool, "", pairs, 0.1)).ok
    assert given == pytest.approx([0.1, 0.09, 0.08, 0.07])
    taken = 0.06
    late = await grading.grade(pool, "", pairs, 0.1)
    assert late.cases == (True, True, False, False)
    assert late.cause.startswith("test 3: timeout")


async def test_a_sandbox_that_cannot_be_made_leaves_no_descriptor() -> None:
    cell = Mock(spec=Cell)
    cell.ask.side_effect = SandboxError("gone")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError):
        Box(cell, 100)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.needs("bubblewrap")
def test_a_sandbox_dies_with_its_owner() -> None:
    script = (
        "import asyncio, sys\nfrom rillflow.agents.sandbox import Sandbox\n"
        "opened = Sandbox().open()\nprint('open', flush=True)\n"
        "code = 'import os, time\\nos.fork()\\nos.setsid() if os.getpid() > 1 else 0\\ntime.sleep(1000)'\n"
        "opened.run_sync(code, seconds=900)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"open\n"
    deadline = time.monotonic() + _PATIENCE
    while len(inside := _descendants(owner.pid)) < 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(inside) >= 8  # bubblewrap, the zygote, keepers and workers
    owner.kill()
    owner.wait(_PATIENCE)
    owner.stdout.close()
    _wait_until_gone(inside)


@pytest.mark.needs("bubblewrap")
def test_one_sandbox_is_shared_by_all_with_the_same_settings() -> None:
    try:
        first, second = shared(SandboxConfig(pool=1)), shared(SandboxConfig(pool=1))
        assert first is second
        assert first is not shared(SandboxConfig(pool=2))
        close_shared()
        assert shared(SandboxConfig(pool=1)).run_sync("1").status == "ok"
    finally:
        close_shared()


def test_the_weaker_isolation_is_chosen_by_name_and_cleans_up() -> None:
    with Sandbox(SandboxConfig(isolation="process", pool=1, memory=256)) as opened:
        seen = opened.run_sync("import os\nprint(os.getcwd())\nsorted(os.environ)")
        assert "HOME" in str(seen.value)
        assert "PYTEST" not in str(seen.value)
        assert opened.run_sync("bytearray(1 << 30)").status == "memory"
        assert opened.run_sync("import time\ntime.sleep(1000)", seconds=0.5).status == "timeout"
        left = opened.run_sync(
            "import os, time\nchild = os.fork()\nif not child:\n    os.setsid(); time.sleep(1000)\nprint(child)"
        )
        assert left.status == "ok"
        assert opened.grade_sync("def f(): return 1", Asserts(("assert f() == 1",))).ok
    _wait_until_gone([int(left.stdout)])
    assert not Path(seen.stdout.strip()).exists()


def _descendants(pid: int) -> list[int]:
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, folder.read_text().split()):
                found += [child, *_descendants(child)]
        except OSError:
            continue
    return found


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """A zombie that waits for its parent no longer runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
