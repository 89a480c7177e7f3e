"""The fork server of a run, started before its recipe is read: it imports torch while the command still makes ready.

    rillflow run ──▶ early fork server: imports          handed to the run's `Preloaded`,
                 └─▶ reads and checks the recipe ──────▶ or ended if no run follows

This module is imported first of all and has to stay light.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rillflow.runtime import forking, warm
from rillflow.runtime.process import child_environment

# The imports of all forked processes.
MODULES = ("torch", "transformers", "rillflow.cli.main", "rillflow.runtime.roles")
COMMAND = (sys.executable, "-m", "rillflow.runtime.forkserver")  # no arguments: the titles of children are longer


def available() -> bool:
    """Return whether processes can be forked safely and watched here."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def server_environment(threads: int) -> dict[str, str]:
    """Return the environment of a fork server. `threads` are those of libraries that roles do not set themselves."""
    return child_environment(threads) | forking.ENVIRONMENT


@dataclass
class EarlyServer:
    """A fork server that has only been asked to import. Its taker must end it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    taken: bool = False

    def take(self, log_path: Path) -> EarlyServer:
        """Hand it over; from now on it writes to this log, beginning with its earlier output."""
        self.channel.sendall(json.dumps({"log": str(log_path.absolute())}).encode() + b"\n")
        self.taken = True
        return self


@contextmanager
def early_server(*, wanted: bool, modules: Sequence[str] = MODULES) -> Iterator[EarlyServer | None]:
    """Start a fork server that imports now, for a run that may follow; yields None if it is not wanted, not available
    or not faster than the warm process. It ends with the block, unless it was taken."""
    path = warm.socket_path()
    if not wanted or not available() or (path is not None and path.exists()):
        yield None
        return
    own, its = socket.socketpair()
    with its, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            COMMAND, stdin=its.fileno(), stdout=output, stderr=output, env=server_environment(0), start_new_session=True
        )
    early = EarlyServer(process, own)
    own.sendall(json.dumps({"run": "", "modules": list(modules)}).encode() + b"\n")
    try:
        yield early
    finally:
        if not early.taken:
            own.close()
            process.kill()
            process.wait()
