"""Runs the user's own commands as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from forked_command import ForkedCommand, fork_command
from rillflow.runtime.warm import PATH_ENV, available, server_environment
from scrubbing import scrub

STARTS_RUNS = {"run", "resume"}  # the commands whose processes are forked, too
WARM_PROCESS = Path(__file__).with_name("warm_process.py")


@dataclass
class Started:
    """A `rillflow` command that is running."""

    process: subprocess.Popen[bytes] | ForkedCommand
    runs: Path
    log: Path

    @property
    def folder(self) -> Path:
        """The newest run folder, once it exists."""
        return max((p for p in self.runs.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()[-3000:]}") from None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


def all_processes_of(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the processes that work on a run folder, each with its role.

    Read their command lines in `info`: a process that ends meanwhile has no other any more.
    """
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield words[words.index(str(folder)) - 1], process


def processes_of(folder: Path) -> dict[str, psutil.Process]:
    """By role, of which a run of one policy, unit and node has one each."""
    return dict(all_processes_of(folder))


def another_hash_seed() -> str:
    """Return a PYTHONHASHSEED that this process does not have."""
    return "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"


@contextmanager
def frozen_trainer(folder: Path) -> Iterator[None]:
    """Freeze the trainer of a run meanwhile: the run makes no step, however fast it is."""
    trainer = processes_of(folder)["trainer"]
    trainer.suspend()
    try:
        yield
    finally:
        trainer.resume()


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    """Optimizer steps written down so far."""
    metrics = folder / "metrics.jsonl"
    return sum(b'"step"' in line for line in metrics.read_bytes().splitlines()) if metrics.is_file() else 0


class Warm:
    """The warm process that all commands of this test process are forked from, started with the first of them.

    It has the environment of the session, not of the test that asks first: that test may set variables of its own.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._environment = server_environment(threads=0)
        self._process: subprocess.Popen[str] | None = None

    def path(self) -> str:
        path = f"{self._folder.name}/socket"
        if self._process is None and available():
            self._process = subprocess.Popen(
                [sys.executable, str(WARM_PROCESS)],
                env=self._environment | {PATH_ENV: path},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline().startswith("ready")
        return path

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=60)
        self._folder.cleanup()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    warm = Warm()
    yield warm
    warm.close()


@dataclass
class Cli:
    """Starts `rillflow` commands in a folder of their own."""

    cwd: Path
    started: list[Started]
    warm: Warm

    def start(self, *arguments: str) -> Started:
        """Start `rillflow ARGUMENTS`, forked from a process that has imported what it needs."""
        warm = {PATH_ENV: self.warm.path() if arguments[0] in STARTS_RUNS else ""}
        if available():
            log = self._next_log()
            forked = fork_command(self.warm.path(), [*arguments], self._environment() | warm, log, self.cwd)
            if forked is not None:
                return self._add(forked, log)
        return self.start_command(sys.executable, "-m", "rillflow", *arguments, **warm)

    def start_command(self, *command: str, **environment: str) -> Started:
        """Start any command whose run folders are made in `runs` here."""
        log = self._next_log()
        with open(log, "w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment() | environment,
            )
        return self._add(process, log)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}

    def _next_log(self) -> Path:
        return self.cwd / f"command-{len(self.started)}.log"

    def _add(self, process: subprocess.Popen[bytes] | ForkedCommand, log: Path) -> Started:
        runs = self.cwd / "runs"
        runs.mkdir(exist_ok=True)
        self.started.append(Started(process, runs, log))
        return self.started[-1]

    def run(self, *arguments: str, seconds: float = 600.0, code: int = 0) -> Started:
        started = self.start(*arguments)
        assert started.wait(seconds) == code, started.output()[-4000:]
        return started


@contextmanager
def commands_in(folder: Path, warm: Warm) -> Iterator[Cli]:
    """Yield a `Cli` for a folder; nothing that it started is left running."""
    cli = Cli(folder, [], warm)
    try:
        yield cli
    finally:
        for started in cli.started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait(60)
            if any(p.is_dir() for p in started.runs.iterdir()):
                for _, process in all_processes_of(started.folder):
                    process.kill()


@pytest.fixture
def cli(tmp_path: Path, warm: Warm) -> Iterator[Cli]:
    with commands_in(tmp_path, warm) as cli:
        yield cli


@pytest.fixture(scope="module")
def shared_cli(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Cli]:
    """A `Cli` for runs that all tests of a module look at. They read the folders of these runs and change nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch, commands_in(tmp_path_factory.mktemp("shared"), warm) as cli:
        scrub(monkeypatch)
        yield cli
