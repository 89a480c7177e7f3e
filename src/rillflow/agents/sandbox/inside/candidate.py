"""The candidate's side of a grading: its code runs once, then its functions are called by name or number.

Nothing that this process sends is trusted: its values are plain bytes, which the judge compares in another process.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from .frames import receive, send
from .program import fresh_module, show
from .values import pack, unpack

_KEPT = 10_000  # most objects that the judge may refer to


def be_candidate(channel: socket.socket, task: dict[str, Any]) -> int:
    """Run the candidate's code and answer the judge's requests; return the exit code."""
    module = fresh_module("candidate")
    kept: list[Any] = []

    def keep(value: Any) -> int:
        if len(kept) >= _KEPT:
            raise ValueError("too many objects are kept for the tests")
        kept.append(value)
        return len(kept) - 1

    try:
        exec(compile(task["code"], "candidate.py", "exec"), module.__dict__)
    except BaseException as error:
        show(error)
        sys.stderr.flush()
        send(channel, pack(f"{type(error).__name__}: {error}"[:500]))
        return 1
    send(channel, pack({"defined": True}))
    line = task["line"]
    while True:
        try:
            request = unpack(receive(line), ref=kept.__getitem__)
        except EOFError:
            return 0
        send(line, _answer(request, module, keep))


def _answer(request: list[Any], module: Any, keep: Any) -> bytes:
    """Return the value of one request, or the name of the exception that it raised."""
    try:
        kind, subject, *rest = request
        if kind == "name":
            if subject not in module.__dict__:
                return pack(["missing"])
            value = module.__dict__[subject]
        elif kind == "call":
            value = subject(*rest[0], **rest[1])
        elif kind == "get":
            value = getattr(subject, rest[0])
        else:
            setattr(subject, *rest)
            value = None
        return pack(["value", value], keep)
    except Exception as error:
        return pack(["raised", type(error).__name__, str(error)[:500]])
