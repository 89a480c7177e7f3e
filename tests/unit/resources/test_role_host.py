"""The actor of one process, and that only strings and numbers pass."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rillflow.errors import RunError
from rillflow.resources.ray_cluster import CHUNK, RoleHost, own_folder


class ScriptHost(RoleHost):
    program = (sys.executable, "-c")


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def started(script: str, **environment: str) -> ScriptHost:
    host = ScriptHost("node", "run")
    host.start(json.dumps({"arguments": [script], "environment": environment, "cwd": ""}))
    return host


def ended(host: RoleHost) -> int:
    deadline = time.monotonic() + 60
    while host.running():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(json.loads(host.look("", 0))["code"])


def test_output_comes_in_bounded_pieces_and_whole() -> None:
    host = started(r"import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000); sys.exit(5)")
    assert ended(host) == 5
    got, log, offset, more = b"", "", 0, True
    while more:
        answer = json.loads(host.look(log, offset))
        assert len(answer["text"]) <= CHUNK
        got += answer["text"].encode("latin-1")
        log, offset, more = answer["log"], answer["offset"], answer["more"]
    assert got == bytes(range(256)) * 1000


def test_the_environment_is_added_to_and_names_the_parent() -> None:
    host = started(
        "import os; print(os.environ['TOKEN'], os.environ['RILLFLOW_PARENT'], bool(os.environ['PATH']))", TOKEN="t"
    )
    assert ended(host) == 0
    assert host.tail() == f"t {os.getpid()} True\n"


def test_a_signal_reaches_what_the_process_has_started() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    host = started(script)
    while not host.tail().endswith("\n"):
        time.sleep(0.02)
    host.signal(signal.SIGKILL)
    assert ended(host) == -signal.SIGKILL
    child = int(host.tail())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_at_a_time() -> None:
    host = started("import time; time.sleep(600)")
    with pytest.raises(RunError, match="runs here already"):
        host.start(json.dumps({"arguments": ["pass"], "environment": {}, "cwd": ""}))
    folder = Path(host.folder())
    host.forget()
    assert not folder.exists()
    assert ended(host) == -signal.SIGKILL


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    own_folder("run").chmod(0o755)
    with pytest.raises(RunError, match="open to other users"):
        ScriptHost("node", "run")
