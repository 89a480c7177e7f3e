"""One sandbox's one task, chosen by the first frame: run a program, be a candidate, or judge one.

A worker is used once. A candidate's process knows the candidate's code and the arguments of the calls it gets; the
judge's process knows the tests and the nonce; neither can reach the other but by plain values on the line between
them.
"""

from __future__ import annotations

import socket

from . import walls
from .candidate import be_candidate
from .frames import receive, send
from .judge import be_judge
from .program import run_program
from .values import unpack

_TASKS = {"program": run_program, "candidate": be_candidate, "judge": be_judge}


def serve(channel: socket.socket) -> int:
    """Say that the walls stand, wait for the task, do it; returns the exit code."""
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
