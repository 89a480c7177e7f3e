"""Check by experiment whether the promises of an isolation hold on this machine."""

from __future__ import annotations

import os
import tempfile
from typing import Literal, NamedTuple

from rillflow.agents.sandbox.interface import SandboxConfig
from rillflow.agents.sandbox.sandbox import Sandbox
from rillflow.agents.sandbox.tests import Asserts

_TESTS = Asserts(("assert double(3) == 6", "assert double(-4) == -8"))
_SECONDS = 30.0


class Finding(NamedTuple):
    """A promise, and whether it holds."""

    promise: str
    holds: bool


def check(isolation: Literal["bubblewrap", "process"]) -> list[Finding]:
    """Start a sandbox and try each promise; SandboxError if it does not start."""
    with (
        Sandbox(SandboxConfig(isolation=isolation, memory=256, seconds=_SECONDS)) as sandbox,
        tempfile.NamedTemporaryFile(prefix="rillflow-") as ours,
    ):
        programs = _programs(ours.name)
        findings = [Finding(promise, sandbox.run_sync(code).value == "True") for promise, code in programs.items()]
        findings += [
            Finding(promise, sandbox.grade_sync(code, _TESTS).ok is wanted)
            for promise, (code, wanted) in _CANDIDATES.items()
        ]
        late = sandbox.run_sync("import time\ntime.sleep(1000)", seconds=0.5)
        long = sandbox.run_sync("while True: print('x' * 1000)")
    ended = [Finding("what does not end is ended", late.status == "timeout")]
    return [*findings, *ended, Finding("output is bounded", long.status == "output")]


def _programs(ours: str) -> dict[str, str]:
    """Return programs whose last value is True if the promise holds."""
    fails = "def fails(act, *arguments):\n    try:\n        act(*arguments)\n    except (OSError, MemoryError):\n"
    fails += "        return True\n    return False\nimport os, socket\n"
    forks = (
        "import time\nmade = 0\ntry:\n    while made < 40:\n        if os.fork() == 0:\n            time.sleep(100)\n"
    )
    forks += "        made += 1\nexcept OSError:\n    pass\nmade < 40"
    user = os.environ.get("USER", "-")
    return {
        "a user without rights": fails + "os.getuid() == 65534 and fails(os.setuid, 0)",
        "no files of ours": fails + f"fails(open, {ours!r})",
        "the system is read-only": fails + "fails(open, '/usr/mine', 'w') and fails(open, '/mine', 'w')",
        "no processes of others": "import os\n{name for name in os.listdir('/proc') if name.isdigit()} == {'1'}",
        "no environment of ours": f"import os\nlen(os.environ) < 12 and os.environ.get('USER') != {user!r}",
        "no network": fails + "fails(socket.socket, socket.AF_INET) and fails(socket.socket, socket.AF_VSOCK)",
        "a filter of system calls": "'Seccomp:\\t2' in open('/proc/self/status').read()",
        "memory is bounded": fails + "fails(bytearray, 1 << 30)",
        "processes are bounded": fails + forks,
    }


_CANDIDATES = {
    "an honest solution passes": ("def double(x):\n    return x + x", True),
    "leaving early passes nothing": ("import os\nos._exit(0)", False),
    "what is equal to everything passes nothing": (
        "class Equal(int):\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Equal()",
        False,
    ),
}
