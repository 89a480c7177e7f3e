"""The process that sandboxes are forked from: the interpreter has started, common modules are loaded, and it knows
nothing. It never reads code, tests or answers; those go from outside straight into the fork that will hold them.

For each request (four descriptors: channel, output, errors, life) it forks a keeper. The keeper makes the new
namespaces, forks the worker into them and stays outside their process namespace, where the worker cannot reach it. It
ends the worker with all its processes when `life` is closed from outside, and writes on `life` how the worker ended:
so the outside learns that from the kernel, not from the worker.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from typing import NoReturn

from . import walls, worker
from .values import unpack

_COMMON = (
    "ast bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string traceback typing"
)


def main() -> None:
    """Read the settings, load modules, say so, then fork on request until the control socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = unpack(control.recv(1 << 16))
    sys.path[:] = [path for path in sys.path if path != settings["home"]] + settings["paths"]
    for name in (*_COMMON.split(), *settings["packages"]):
        __import__(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            _keep(settings, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(settings: dict[str, object], channel: int, output: int, errors: int, life: int) -> NoReturn:
    """The keeper: never returns, whatever happens."""
    status = -1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        walled = settings["isolation"] == "bubblewrap"
        home = "/tmp" if walled else tempfile.mkdtemp(prefix="sandbox-")
        if walled:
            walls.new_namespaces()
        else:
            walls.adopt_orphans()
        child = os.fork()
        if child == 0:
            os.close(life)
            _become_worker(settings, home, channel, output, errors)
        for descriptor in (channel, output, errors):
            os.close(descriptor)
        status = _until_end(child, life)
        if not walled:
            _end_orphans()
            shutil.rmtree(home, ignore_errors=True)
    finally:
        try:
            os.write(life, status.to_bytes(4, "little", signed=True))
        finally:
            os._exit(0)


def _until_end(child: int, life: int) -> int:
    """Wait for the worker's end or for the outside's, which is made the worker's; return how it ended."""
    watched = select.poll()
    handle = os.pidfd_open(child)
    watched.register(handle, select.POLLIN)
    watched.register(life, select.POLLIN)
    watched.poll()
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end_orphans() -> None:
    """Without a process namespace, what the worker left behind has to be hunted down, generation by generation."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        if not children:
            return
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become_worker(settings: dict[str, object], home: str, channel: int, output: int, errors: int) -> NoReturn:
    """Raise the walls, then serve; a wall that cannot be raised is said on the channel before anything is run."""
    code = 1
    try:
        connection = socket.socket(fileno=channel)
        walls.die_with_parent()
        limits, program = settings["limits"], settings["filter"]
        assert isinstance(limits, dict)
        assert isinstance(program, bytes)
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for descriptor, place in ((null, 0), (output, 1), (errors, 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)
        if settings["isolation"] == "bubblewrap":
            walls.new_mounts(limits["disk"])
            walls.set_limits(limits, alone=True)
            walls.give_up(program)
        else:
            walls.set_limits(limits, alone=False)
        os.chdir(home)
        code = worker.serve(connection)
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode()[:1000])
    finally:
        os._exit(code)
