"""Ranks as processes: they live and die together, under the code of the one that was the cause."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rillflow.errors import ConfigError
from rillflow.trainer.parallel import launch as launching
from rillflow.trainer.parallel.launch import LEFT_ALONE, Place, launch, listen, parse

SLEEP = "import time; time.sleep(600)"


def launched(tmp_path: Path, *programs: str) -> int:
    """Rank r runs program r, with its rank, the rendezvous and the folder as arguments."""

    def command(rank: int, rendezvous: str) -> Sequence[str]:
        return [sys.executable, "-S", "-c", programs[rank], str(rank), rendezvous, str(tmp_path)]

    return launch(command, len(programs), os.environ, lambda rank: tmp_path / f"rank{rank}.log")


def test_all_that_finish_are_a_success_and_logs_are_told_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    speak = "import sys; print('rank', sys.argv[1], 'speaks')"
    assert launched(tmp_path, *[speak] * 3) == 0
    assert "rank 0 speaks" in capfd.readouterr().out
    assert [(tmp_path / f"rank{rank}.log").read_text() for rank in (1, 2)] == ["rank 1 speaks\n", "rank 2 speaks\n"]


def test_ranks_reach_the_rendezvous(tmp_path: Path) -> None:
    reach = "import socket, sys; host, port = sys.argv[2].split(':'); socket.create_connection((host, int(port)), 60)"
    assert launched(tmp_path, reach, reach) == 0


def test_one_that_dies_ends_all_with_its_code_and_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "_LAST_WORDS", 0.3)
    pids = "import os, sys; open(f'{sys.argv[3]}/pid{sys.argv[1]}', 'w').write(str(os.getpid()));"
    wait = "import time\nwhile len([n for n in os.listdir(sys.argv[3]) if n[:3] == 'pid']) < 3: time.sleep(.01)"
    dies = f"{pids}{wait}\nprint('out of luck'); sys.exit(5)"
    started = time.monotonic()
    assert launched(tmp_path, pids + SLEEP, dies, pids + SLEEP) == 5
    assert time.monotonic() - started < 60
    assert "rank 1 ended with code 5" in caplog.text
    assert "| out of luck" in caplog.text
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_who_was_only_left_alone_is_not_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_LAST_WORDS", 60.0)
    alone = f"import sys; sys.exit({LEFT_ALONE})"
    killed = "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"
    assert launched(tmp_path, alone, killed, alone) == 128 + signal.SIGKILL
    assert launched(tmp_path, alone, alone) == LEFT_ALONE
    aborted = "import os; os.abort()"
    fails = "import sys, time; time.sleep(0.5); sys.exit(3)"
    assert launched(tmp_path, aborted, fails, alone) == 3
    assert launched(tmp_path, alone, aborted) == 128 + signal.SIGABRT


def test_a_signal_reaches_all_ranks_and_their_code_comes_back(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "open(f'{sys.argv[3]}/ready{sys.argv[1]}', 'w')\n"
        "time.sleep(60)"
    )

    def terminate() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate, daemon=True).start()
    assert launched(tmp_path, program, program) == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_STOP_GRACE", 0.3)
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{sys.argv[3]}/ready{sys.argv[1]}', 'w')\n"
        "time.sleep(60)"
    )

    def terminate() -> None:
        while not (tmp_path / "ready0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    assert launched(tmp_path, program) == 128 + signal.SIGKILL


# ---------------------------------------------------------------- addresses


def test_addresses() -> None:
    assert parse("127.0.0.1:29400") == ("127.0.0.1", 29400)
    assert parse("[::1]:5") == ("::1", 5)
    for wrong in ("", "host", "host:", ":5", "host:0", "host:70000", "host:x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse(wrong)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Place(rank, ranks)


def test_the_rendezvous_is_on_loopback_only_and_a_taken_port_is_named() -> None:
    with listen("127.0.0.1") as server:
        host, port = server.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
        with socket.create_connection((host, port), 5):
            pass
