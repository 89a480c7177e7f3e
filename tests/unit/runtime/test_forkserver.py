"""Forked children as real processes: their state, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("fork")

TESTS = Path(__file__).parents[2]
PARENT = """
import json, os, signal, sys
import forked_code
from rillflow.runtime.forkserver import ForkedChild, unsafe
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1] + "/handled", "w"))
kept = open(sys.argv[1] + "/kept", "w")
folder = Path(sys.argv[1])
assert unsafe() is None
"""


def run_parent(tmp_path: Path, code: str) -> str:
    """Run `code` after `PARENT` in a process of its own and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-c", PARENT + code, str(tmp_path)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_is_like_a_process_of_its_own(tmp_path: Path) -> None:
    seen = (
        "import json, os, signal, sys, setproctitle;"
        "print(json.dumps({'argv': sys.argv[2:], 'files': [n for n in map(int, os.listdir('/proc/self/fd')) if n < 50],"
        "'word': os.environ.get('WORD'), 'home': 'HOME' in os.environ, 'title': setproctitle.getproctitle()[-4:],"
        "'term': signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, 'blocked': len(signal.pthread_sigmask(0, [])),"
        "'input': sys.stdin.read(), 'group': os.getpgid(0) == os.getpgid(os.getppid())}))"
    )
    run_parent(
        tmp_path,
        f"child = ForkedChild([{seen!r}, 'more'], {{'WORD': 'said', 'PATH': '/bin'}}, folder / 'log')\n"
        "assert child.wait(60) == 0",
    )
    child = json.loads((tmp_path / "log").read_text())
    assert len(child.pop("files")) <= 4  # the three that every process has, and the folder that is being listed
    assert child == {
        "argv": ["more"], "word": "said", "home": False, "title": "more", "term": True, "blocked": 0, "input": "",
        "group": True,  # who ends the parent's group ends the child
    }  # fmt: skip


def test_ends_are_those_of_the_kernel_and_the_parents_code_does_not_run_in_the_child(tmp_path: Path) -> None:
    printed = run_parent(
        tmp_path,
        "try:\n"
        "    codes = ['sys.exit(7)', 'raise ValueError(1)', 'os.kill(os.getpid(), 9)', 'os._exit(4)', 'pass']\n"
        "    children = [ForkedChild(['import os, sys; ' + c], {}, folder / 'log') for c in codes]\n"
        "    print(json.dumps([child.wait(60) for child in children]))\n"
        "finally:\n"
        "    print('parent ends')\n",
    )
    assert json.loads(printed.splitlines()[0]) == [7, 1, -signal.SIGKILL, 4, 0]
    assert printed.count("parent ends") == 1
    assert "ValueError: 1" in (tmp_path / "log").read_text()


def test_threads_that_have_been_joined_do_not_count(tmp_path: Path) -> None:
    """The kernel ends a thread a little after Python has joined it."""
    run_parent(
        tmp_path,
        "import threading\n"
        "for _ in range(500):\n"
        "    thread = threading.Thread(target=lambda: None)\n"
        "    thread.start(), thread.join()\n"
        "    assert unsafe() is None, unsafe()\n"
        "end = threading.Event()\n"
        "threading.Thread(target=end.wait, daemon=True).start()\n"
        "assert 'it has 2 threads' in unsafe()\n"
        "end.set()",
    )


def test_signals_meet_the_child_not_its_parents_handlers(tmp_path: Path) -> None:
    run_parent(
        tmp_path,
        "for _ in range(20):\n"
        "    child = ForkedChild(['import time; time.sleep(600)'], {}, folder / 'log')\n"
        "    assert child.poll() is None\n"
        "    child.terminate()\n"
        "    assert child.wait(60) == -signal.SIGTERM\n",
    )
    assert not (tmp_path / "handled").exists()


def test_garbage_of_the_parent_closes_no_file_of_the_child(tmp_path: Path) -> None:
    """Such as a source of prompts that a launcher has opened to check it."""
    run_parent(
        tmp_path,
        "import gc, weakref\n"
        "class Opened:\n"
        "    def __init__(self):\n"
        "        self.own, self.file = self, os.dup(kept.fileno())\n"
        "        weakref.finalize(self, os.close, self.file)\n"
        "gc.disable()\n"
        "file = Opened().file\n"
        "code = f'import gc, os; os.dup2(1, {file}); gc.collect(); os.fstat({file})'\n"
        "assert ForkedChild([code], {}, folder / 'log').wait(60) == 0, (folder / 'log').read_text()",
    )


def test_a_process_with_threads_does_not_fork_its_ranks(tmp_path: Path) -> None:
    """They are processes of their own then; the first one shows that `forked_code` is imported, the second does not."""
    printed = run_parent(
        tmp_path,
        "import logging, threading\nfrom rillflow.runtime.forkserver import start_ranks\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "start = start_ranks(['numpy'])\n"
        "assert 'numpy' in sys.modules and unsafe() is None, unsafe()\n"
        "print(start(['pass', '--rank', '0'], os.environ, folder / 'log').wait(60))\n"
        "end = threading.Event(); threading.Thread(target=end.wait).start()\n"
        "print(start(['version', '--rank', '1'], os.environ, folder / 'log').wait(60), unsafe()); end.set()",
    )
    assert printed.splitlines() == [
        "forking rank 0",
        "0",
        "starting rank 1, which imports for itself: this process must not fork, it has 2 threads (python, python)",
        "2 it has 2 threads (python, python)",  # the real `rillflow version` knows no rank
    ]
    assert "No such option" in (tmp_path / "log").read_text()
