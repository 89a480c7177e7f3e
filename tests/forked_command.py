"""Commands and other programs that are forked from a process that has imported what they need."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from unittest.mock import patch

from rillflow.runtime import warm
from rillflow.runtime.forkserver import ENVIRONMENT
from rillflow.runtime.process import role_environment

PATIENCE = 120.0
PYTHON = "python"  # the first argument of a request for `python ARGUMENTS`
NAMESPACE = "RILLFLOW_TEST_NAMESPACE"  # the network namespace that a program shall run in


class ForkedCommand:
    """A command that was forked. As of `subprocess.Popen`: pid, poll, wait, send_signal, terminate, kill."""

    def __init__(self, channel: socket.socket, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._channel = channel
        self._received = b""
        self._code: int | None = None
        request = {"id": 1, "arguments": arguments, "environment": dict(environment), "log": str(log)}
        channel.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._told(PATIENCE)["pid"]

    def _told(self, seconds: float | None) -> dict[str, int]:
        """Return the next message of the fork server; TimeoutError if none comes in time."""
        self._channel.settimeout(seconds)
        while b"\n" not in self._received:
            more = self._channel.recv(1 << 16)
            assert more, "the fork server has ended"
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))

    def poll(self) -> int | None:
        try:
            return self.wait(0.001)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._channel.settimeout(timeout)
            try:
                self._code = self._told(timeout)["code"]
            except TimeoutError:
                raise subprocess.TimeoutExpired("rillflow", timeout or 0.0) from None
            self._channel.close()  # which ends the fork server
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):  # it has ended, and was not waited for
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Program = ForkedCommand | subprocess.Popen[bytes]


def fork_python(
    path: str, words: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path | None = None
) -> Program:
    """Run `python WORDS` (a script, or `-m` and a module), forked from the warm process that listens at `path`."""
    forked = fork_command(path, [PYTHON, *words], environment, log, cwd)
    if forked is not None:
        return forked
    with open(log, "ab") as output:
        return subprocess.Popen([sys.executable, *words], stdout=output, stderr=output, env=environment, cwd=cwd)


def fork_command(
    path: str, arguments: list[str], environment: Mapping[str, str], log: Path, cwd: Path | None = None
) -> ForkedCommand | None:
    """Fork a command from the warm process that listens at `path`; None where that does not serve this environment."""
    environment = {**environment, **role_environment(1), **ENVIRONMENT}
    own, its = socket.socketpair()
    with patch.dict(os.environ, {warm.PATH_ENV: path}), chdir(cwd or Path.cwd()), its:
        if warm.fork_server(its, environment, log) is None:
            own.close()
            return None
    return ForkedCommand(own, arguments, environment, log)
