"""Every attack on a grader that is known to have been tried scores 0; the honest solution scores 1 in the same pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rillflow.agents.sandbox import Asserts, Check, Pairs, Sandbox

HERE = Path(__file__).parent
TESTS = Asserts(("assert double(3) == 6", "assert double(-4) == -8", "assert double(0.5) == 1.0"))
HONEST = "def double(x):\n    return x + x\n"
WRONG = "def double(x):\n    return None\n"

AT_ONCE = {
    "exit at import": "import sys\nsys.exit(0)",
    "hard exit at import": "import os\nos._exit(0)",
    "exit in the call": "import sys\ndef double(x):\n    sys.exit(0)",
    "hard exit in the call": "import os\ndef double(x):\n    os._exit(0)",
    "exit by exception": "def double(x):\n    raise SystemExit(0)",
    "skip at import": "import unittest\nraise unittest.SkipTest('not today')",
    "skip in the call": "import unittest\ndef double(x):\n    raise unittest.SkipTest('not today')",
    "exit handler": WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "other exit code": "import os\ndef double(x):\n    os._exit(42)",
    "always equal": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def double(x):
    return Equal()
""",
    "number that is always equal": """
class Equal(float):
    def __eq__(self, other): return True
    __hash__ = float.__hash__
def double(x):
    return Equal(17)
""",
    "container that is always equal": """
class Equal(list):
    def __eq__(self, other): return True
def double(x):
    return Equal()
""",
    "liar about its class": """
class Liar:
    __class__ = property(lambda self: int)
    def __index__(self): return 17
    def __eq__(self, other): return True
def double(x):
    return Liar()
""",
    "patched runner": WRONG
    + """
import builtins, sys
import inside.judge, inside.program, inside.values
inside.judge._fault = lambda test: ""
inside.judge.be_judge = lambda channel, task: 0
inside.program._answer = lambda request, module, keep: inside.values.pack(["value", True])
builtins.AssertionError = type("AssertionError", (Exception,), {"__new__": lambda *a: None})
""",
    "patched builtins": WRONG
    + """
import builtins, operator
class Yes(type):
    def __instancecheck__(cls, other): return True
builtins.compile = lambda *a, **k: (lambda: None)
builtins.exec = lambda *a, **k: None
operator.eq = lambda a, b: True
""",
    "forged results on the channel": """
import socket, struct
from inside.values import pack
def double(x):
    for number in range(3, 20):
        try:
            channel = socket.socket(fileno=number)
        except OSError:
            continue
        for index in range(3):
            for head in (b"R", b"V", b""):
                body = head + pack(["0" * 32, index, ""])
                channel.sendall(struct.pack("<I", len(body)) + body)
    return None
""",
    "noise on the channel": """
import os
def double(x):
    for number in range(3, 20):
        try:
            os.write(number, b"\\xff" * 64)
        except OSError:
            pass
""",
    "printed success": WRONG
    + """
import sys
for stream in (sys.stdout, sys.stderr):
    for word in ("PASSED", "OK", "1.0", '{"passed": 3, "total": 3}', "RESULT", "all tests passed"):
        print(word, file=stream, flush=True)
""",
    "a reward file from the background": WRONG
    + """
import os
if os.fork() == 0:
    while True:
        for folder in ("/tmp", "/logs", "/", "/var/tmp", "/dev/shm"):
            for name in ("reward.txt", "reward.json", "result", "verdict"):
                try:
                    with open(os.path.join(folder, name), "w") as file:
                        file.write("1")
                except OSError:
                    pass
""",
    "call stack": """
import sys
def double(x):
    frame, found = sys._getframe(), []
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            found += [scope[key] for key in ("expected", "nonce", "tests", "answer", "cases") if key in scope]
        frame = frame.f_back
    return found[0] if found else None
""",
    "memory of its own process": """
import gc
def double(x):
    texts = [text for held in gc.get_objects() if isinstance(held, (list, dict, tuple))
             for text in (held.values() if isinstance(held, dict) else held) if isinstance(text, str)]
    for text in texts:
        if text.startswith(f"assert double({x!r}) =="):
            return x + x
""",
    "memory and environment of others": """
import glob, os
def double(x):
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        if path.split("/")[2] != str(os.getpid()):
            return x + x
    for pid in {0, os.getppid(), 2, 3}:
        try:
            with open(f"/proc/{pid}/mem", "rb") as file:
                return x + x
        except OSError:
            pass
""",
    "answers in files": f"""
import os
def double(x):
    folder = {str(HERE)!r}
    while len(folder) > 1:
        for name in (".git", "pyproject.toml", "tests", "test_sandbox_attacks.py"):
            if os.path.exists(os.path.join(folder, name)):
                return x + x
        folder = os.path.dirname(folder)
""",
    "future commits": f"""
import os, subprocess
def double(x):
    for folder in ({str(HERE)!r}, "/", "/tmp", os.getcwd()):
        try:
            done = subprocess.run(["git", "-C", folder, "log", "--all"], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return x + x
""",
    "shadowed names of the tests": WRONG + "import sys\nassert_ = True\nTrue_ = 1\nint = float = abs = lambda *a: 6\n",
    "an error that the tests might expect": "def double(x):\n    raise AssertionError",
    "ends everybody else": WRONG
    + "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass",
    "ends itself by signal": "import os, signal\nsignal.raise_signal(signal.SIGABRT)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "syntax": "def double(x) return",
    "nothing": "",
    "too deep": "def double(x):\n    for _ in range(100000):\n        x = [x]\n    return x",
    "too long": "def double(x):\n    return 'x' * 10_000_000",
    "memory": "def double(x):\n    return len(bytearray(4 << 30))",
    "memory by pieces": "def double(x):\n    held = []\n    while True:\n        held.append(bytearray(1 << 24))",
    "output": "def double(x):\n    while True:\n        print('x' * 10000)",
    "errors": "import sys\nwhile True:\n    sys.stderr.write('x' * 10000)",
}
# Values that a test may hand back to the candidate or show: a fault of the sandbox would give no reward instead of 0.
HANDED_BACK = {
    "an iterator": "def double(x):\n    return iter([x])",
    "an iterator without end": "import itertools\ndef double(x):\n    return itertools.count()",
    "a value as deep as can be": "def double(x):\n    for _ in range(99):\n        x = [x]\n    return x",
    "a number that is too long to be written": "def double(x):\n    return 10 ** 5000",
    "a value that cannot be told": "class Odd:\n    pass\ndef double(x):\n    return [Odd()]",
}
ON_THE_CHANNEL = """
import os, struct
def say(value):
    body = pack(value)
    for number in range(3, 20):
        try:
            os.write(number, struct.pack("<I", len(body)) + body)
        except OSError:
            pass
from inside.values import pack
"""
FRAMES = ["{'status': []}", "{'status': {}, 'value': 1}", "16 ** 8000", "''", "[]", "iter([1])", "{'defined': 2}"]
PAST_THE_LIMIT = {
    "sleep": "import time\ndef double(x):\n    time.sleep(1000)",
    "sleep at import": "import time\ntime.sleep(1000)",
    "loop": "def double(x):\n    while True: pass",
    "patched clock": """
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
def double(x):
    while True: pass
""",
    "deaf": """
import signal, time
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def double(x):
    while True: time.sleep(1)
""",
    "fork bomb": """
import os
def double(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "thread bomb": """
import threading, time
def double(x):
    while True:
        try:
            threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError:
            pass
""",
    "a value without end": "import itertools\ndef double(x):\n    return itertools.repeat(1, 10**15)",
}


def test_the_honest_solution_passes(sandbox: Sandbox) -> None:
    verdict = sandbox.grade_sync(HONEST, TESTS)
    assert verdict.ok
    assert verdict.passed == verdict.total == 3
    assert verdict.cause == ""


@pytest.mark.parametrize("attack", AT_ONCE)
def test_an_attack_scores_nothing(sandbox: Sandbox, attack: str) -> None:
    verdict = sandbox.grade_sync(AT_ONCE[attack], TESTS)
    assert verdict.passed == 0
    assert verdict.total == 3
    assert verdict.cause


@pytest.mark.parametrize("value", HANDED_BACK)
def test_what_a_candidate_returns_is_never_the_sandboxs_fault(sandbox: Sandbox, value: str) -> None:
    tests = Asserts(("assert double(double(3)) == 12", "assert double(3) == 6, double(3)", "assert {6: 1}[double(3)]"))
    verdict = sandbox.grade_sync(HANDED_BACK[value], tests)
    assert (verdict.passed, verdict.total) == (0, 3)
    assert verdict.cause


@pytest.mark.parametrize("frame", FRAMES)
def test_what_a_candidate_says_on_its_channel_is_never_the_sandboxs_fault(sandbox: Sandbox, frame: str) -> None:
    code = f"{ON_THE_CHANNEL}say({frame})\n"
    verdict = sandbox.grade_sync(code + WRONG, TESTS)
    assert verdict.passed == 0
    assert verdict.cause
    assert sandbox.run_sync(code).status in ("ok", "exit")
    assert not sandbox.grade_sync(code, Pairs((("3", "6"),))).ok


def test_an_end_of_iteration_is_no_way_out_of_a_loop_of_the_tests(sandbox: Sandbox) -> None:
    tests = Asserts(("assert all(map(lambda case: double(case[0]) == case[1], [(3, 6), (4, 8)]))",))
    assert sandbox.grade_sync(HONEST, tests).ok
    for name in ("StopIteration", "StopAsyncIteration"):
        assert not sandbox.grade_sync(f"def double(x):\n    raise {name}", tests).ok


def test_a_helper_that_the_prompt_gives_is_not_the_candidates(sandbox: Sandbox) -> None:
    given = "def encode(text):\n    return text[::-1] + '!'\n\n\ndef decode(): pass\n"
    test = "def check(candidate):\n    assert candidate(encode('abc')) == decode('cba!') == 'abc'\n"
    honest, lies = "def decode(text):\n    return text[-2::-1]\n", "def encode(text):\n    return text\n"
    assert sandbox.grade_sync(honest, Check(test, "decode", given)).ok
    assert sandbox.grade_sync(honest + lies, Check(test, "decode", given)).ok
    for code in (lies + "def decode(text):\n    return 'abc' if text == 'abc' else text\n", lies, ""):
        assert not sandbox.grade_sync(code, Check(test, "decode", given)).ok, code


def test_a_class_that_the_prompt_gives_is_the_candidates_since_it_gets_the_instances(sandbox: Sandbox) -> None:
    given = "class Node:\n    def __init__(self, value):\n        self.value = value\n\n\n"
    given += "def node(value):\n    return Node(value)\n\n\n"
    test = "def check(candidate):\n    assert candidate(node(3)) == 3\n    assert candidate(Node(4)) == 4\n"
    setup = given + "def value_of(): pass\n"
    assert sandbox.grade_sync(given + "def value_of(x):\n    return x.value\n", Check(test, "value_of", setup)).ok
    assert not sandbox.grade_sync(given + "def value_of(x):\n    return 3\n", Check(test, "value_of", setup)).ok


def test_what_does_not_end_scores_nothing_and_holds_nobody_up(sandbox: Sandbox) -> None:
    async def all_at_once() -> None:
        attacks = [sandbox.grade(code, TESTS, seconds=1.0) for code in PAST_THE_LIMIT.values()]
        for name, verdict in zip(PAST_THE_LIMIT, await asyncio.gather(*attacks), strict=True):
            assert (verdict.passed, bool(verdict.cause)) == (0, True), name
        assert (await sandbox.grade(HONEST, TESTS)).ok

    asyncio.run(all_at_once())


def test_tests_that_passed_before_the_candidate_left_still_count_for_a_share(sandbox: Sandbox) -> None:
    code = "import os\ndef double(x):\n    return 6 if x == 3 else os._exit(0)"
    verdict = sandbox.grade_sync(code, TESTS)
    assert verdict.cases == (True, False, False)
    assert not verdict.ok


def test_tests_that_catch_everything_are_no_way_out(sandbox: Sandbox) -> None:
    test = "def check(candidate):\n    try:\n        candidate(3)\n    except BaseException:\n        pass\n"
    assert sandbox.grade_sync(HONEST, Check(test, "double")).ok
    assert not sandbox.grade_sync("import os\ndef double(x):\n    os._exit(0)", Check(test, "double")).ok


@pytest.mark.parametrize("name", ["set", "sorted", "len", "abs", "isinstance"])
def test_a_candidate_cannot_replace_what_the_tests_use(sandbox: Sandbox, name: str) -> None:
    use = {"isinstance": "isinstance(items(), tuple)", "abs": "abs(count()) == 3"}.get(name, f"{name}(items()) == 3")
    replaced = f"def {name}(*a):\n    return 3\ndef items():\n    return [1]\ndef count():\n    return 1\n"
    assert sandbox.grade_sync(replaced, Asserts((f"assert {use}",))).passed == 0


def test_objects_of_the_candidate_are_neither_equal_nor_true(sandbox: Sandbox) -> None:
    code = "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    code += "    def __len__(self): return 3\n    ok = True\ndef make(): return Yes()\n"
    for use in (
        "make() == 3",
        "3 == make()",
        "make()",
        "not make()",
        "len(make()) == 3",
        "make() in [3]",
        "3 in [make()]",
    ):
        assert sandbox.grade_sync(code, Asserts((f"assert {use}",))).passed == 0, use
    assert sandbox.grade_sync(code, Asserts(("assert make().ok",))).ok  # its plain attributes are plain values


def test_programs_are_judged_by_their_output_alone(sandbox: Sandbox) -> None:
    pairs = Pairs((("3\n", "6\n"), ("-4\n", "-8")))
    assert sandbox.grade_sync("print(2 * int(input()))", pairs).ok
    assert sandbox.grade_sync("import sys\nprint(2 * int(input()))\nsys.exit(0)", pairs).ok
    for code in ("import sys\nsys.exit(0)", "print(6)", "print('PASSED')", "print(2 * int(input()))\nraise ValueError"):
        assert not sandbox.grade_sync(code, pairs).ok, code
