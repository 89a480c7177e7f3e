"""A running zygote, seen from outside: it is started once and forks a sandbox on each request.

It lives as long as its control socket and the thread that started it. If this process dies, the kernel ends the zygote
and all its sandboxes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from typing import IO, Any

from rillflow.agents.sandbox import bubblewrap, seccomp
from rillflow.agents.sandbox.inside.values import pack
from rillflow.agents.sandbox.interface import SandboxConfig
from rillflow.errors import SandboxError

_START = 60.0  # seconds; a busy machine, and packages to load
_MIB = 1 << 20


class Cell:
    """A zygote. The constructor waits until it is ready; an error says why it is not."""

    def __init__(self, config: SandboxConfig) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the cell
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start(config, theirs, self._errors)
        except BaseException:
            self._control.close()
            self._errors.close()
            raise
        try:
            self._control.settimeout(_START)
            self._control.sendall(pack(_settings(config)))
            ready = self._control.recv(16)
        except OSError as error:
            ready = str(error).encode()
        if ready != b"ready":
            self._end()
            said = self._said() or "no reason given"
            self._errors.close()
            raise SandboxError(f"the sandbox does not start: {said}", bubblewrap.INSTALL)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, descriptors: list[int]) -> None:
        """Request a sandbox that owns these descriptors."""
        try:
            socket.send_fds(self._control, [b"+"], descriptors)
        except OSError as error:
            raise SandboxError(
                f"the sandbox's first process has gone: {error}", "the next run starts it again"
            ) from None

    def close(self) -> None:
        """End the zygote and its sandboxes."""
        self._end()
        self._errors.close()

    def _end(self) -> None:
        """Close the control socket, at which the zygote exits; kill it if it does not."""
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read(4000).decode(errors="replace").strip()


def _settings(config: SandboxConfig) -> dict[str, Any]:
    walled = config.isolation == "bubblewrap"
    disk = config.disk * _MIB
    return {
        "isolation": config.isolation,
        "home": bubblewrap.HOME if walled else str(bubblewrap.INSIDE.parent),
        "paths": [bubblewrap.PACKAGES] if walled else [],
        "packages": list(config.packages) if walled else [],
        "limits": {"memory": config.memory * _MIB, "processes": config.processes, "disk": disk},
        "filter": seccomp.program() if walled else b"",
    }


def _start(config: SandboxConfig, control: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    number = control.fileno()
    if config.isolation == "process":
        if config.packages:
            raise SandboxError("`packages` needs the isolation bubblewrap", "leave `packages` out")
        line = bubblewrap.python_command(str(bubblewrap.INSIDE.parent), number)
        return _spawn(line, (number,), errors)
    program = os.memfd_create("filter")
    try:
        os.write(program, seccomp.program(building=True))
        os.lseek(program, 0, os.SEEK_SET)
        return _spawn(bubblewrap.command(config.packages, number, program), (number, program), errors)
    finally:
        os.close(program)


def _spawn(line: list[str], descriptors: tuple[int, ...], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=descriptors,
            env=bubblewrap.environment(),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the sandbox does not start: {error}", bubblewrap.INSTALL) from None
