"""The process from which sandboxes are forked. It has loaded common modules and never sees code, tests or answers:
those go from outside directly into the fork that uses them.

For each request (four descriptors: channel, output, errors, life) it forks a keeper. The keeper makes the namespaces,
forks the worker into them and stays outside their process namespace, where the worker cannot reach it. It kills the
worker with all its processes when `life` is closed from outside, and writes to `life` how the worker ended. So the
outside learns the end from the kernel and not from the worker.
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

from . import walls
from .judge import be_judge
from .program import be_candidate, run_program
from .values import receive, send, unpack

_COMMON = (
    "ast bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string traceback typing"
)
_TASKS = {"program": run_program, "candidate": be_candidate, "judge": be_judge}


def main() -> None:
    """Read the settings, load modules, report that, then fork on request until the control socket closes."""
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
    """Be the keeper of one worker. It never returns."""
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
    """Wait until the worker ends or `life` is closed, kill the worker, and return how it ended."""
    watched = select.poll()
    handle = os.pidfd_open(child)
    watched.register(handle, select.POLLIN)
    watched.register(life, select.POLLIN)
    watched.poll()
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end_orphans() -> None:
    """Kill the processes that the worker left behind, generation by generation: no namespace ends them."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        if not children:
            return
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become_worker(settings: dict[str, object], home: str, channel: int, output: int, errors: int) -> NoReturn:
    """Isolate this process, then serve one task; if a step of the isolation fails, nothing is run."""
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
        code = _serve(connection)
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode()[:1000])
    finally:
        os._exit(code)


def _serve(channel: socket.socket) -> int:
    """Report that the worker is isolated, wait for its one task, do it, and return the exit code.

    A candidate's process knows the candidate's code and the arguments of its calls; the judge's process knows the tests
    and the nonce. They reach each other only by plain values on the line between them.
    """
    send(channel, b"up")
    try:
        _, lines, _, _ = socket.recv_fds(channel, 1, 1)
        task = unpack(receive(channel))
    except (EOFError, OSError):
        return 0
    if lines:
        task["line"] = socket.socket(fileno=lines[0])
    walls.limit_processor(task["seconds"])
    return _TASKS[task["task"]](channel, task)
