"""A server's process is never left behind, nor what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from counting_engine import until
from rillflow.engine.servers.process import ServerProcess, free_port

# A server with a child of its own that does not hear SIGTERM.
_SERVER = """
import signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
time.sleep(600)
"""
# One that ends its child by word of mouth; a signal would be the end of both.
_TIDY = """
import signal, subprocess, sys, time
heard = "import sys; sys.stdin.read(); print('tidy', flush=True)"
child = subprocess.Popen([sys.executable, "-c", heard], stdin=subprocess.PIPE)

def end(*_):
    print("told", flush=True)
    child.stdin.close()
    raise SystemExit

signal.signal(signal.SIGTERM, end)
print(child.pid, flush=True)
time.sleep(600)
"""
_PARENT = """
import asyncio, sys
from pathlib import Path
from rillflow.engine.servers.process import ServerProcess

async def main():
    process = ServerProcess([sys.executable, "-c", sys.argv[1]], environment={}, log=Path(sys.argv[2]))
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _child(log: Path) -> int:
    text = log.read_text() if log.exists() else ""
    return int(text) if text.endswith("\n") else 0


async def test_stopping_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    process = ServerProcess([sys.executable, "-c", _SERVER], environment=dict(os.environ), log=log)
    await process.start()
    await until(lambda: _child(log) > 0)
    child = _child(log)
    assert process.running
    assert _lives(child)
    await process.stop()
    assert not process.running
    assert not _lives(child), "what it held is free for the next one"


async def test_it_may_end_its_children_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have memory of the machine to give back, which a signal of ours would keep them from."""
    for name in ("_GENTLE_SECONDS", "_ORPHANS_SECONDS"):  # the child may still be starting
        monkeypatch.setattr(f"rillflow.engine.servers.process.{name}", 60.0)
    log = tmp_path / "server.log"
    process = ServerProcess([sys.executable, "-c", _TIDY], environment=dict(os.environ), log=log)
    await process.start()
    await until(lambda: _child(log) > 0)
    await process.stop()
    assert log.read_text().split()[1:] == ["told", "tidy"]


async def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", _PARENT, _SERVER, str(log)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - it returns at once
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    await until(lambda: _child(log) > 0)
    child = _child(log)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    await until(lambda: not _lives(server) and not _lives(child))


async def test_its_last_words_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = ServerProcess([sys.executable, "-c", "raise SystemExit('no GPU')"], environment={}, log=log)
    await process.start()
    assert await process.wait() == 1
    assert "no GPU" in process.tail()
    await process.stop()


_REFUSED = """\
INFO 11-18 20:47:10 [config.py:1] loading
(EngineCore pid=7) ERROR 11-18 20:47:11 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-18 20:47:11 [core.py:9] ValueError: Head size 8 is not supported
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""
_INVALID = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Odd'] are not supported
    For further information visit https://errors.pydantic.dev
"""


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("", ""),
        (_REFUSED, "ValueError: Head size 8 is not supported"),
        (
            _INVALID,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, Model architectures ['Odd'] are not supported",
        ),
    ],
)
def test_the_cause_of_its_end_is_read_from_its_log(words: str, cause: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(words)
    assert ServerProcess([], environment={}, log=log).cause() == cause


def test_ports_are_on_loopback_and_free() -> None:
    assert 1024 <= free_port() <= 65535
