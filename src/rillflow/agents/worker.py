"""The program of a worker process: `python -m rillflow.agents.worker MODULE:FUNCTION [ARGUMENT…]`.

FUNCTION is called with the arguments and returns a handler. The handler is called with one question after the other;
its result is the answer. Questions and answers are JSON in frames on the socket that is standard input.

Invariants: the process exits when its socket closes, so an idle worker never outlives the process that started it. The
output of a library goes to standard error and never into the protocol.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from rillflow.agents.sandbox.inside.values import receive, send
from rillflow.errors import RillflowError

LARGEST = 16 << 20  # bytes of a question or an answer
_LONGEST_ERROR = 2000  # characters

Question = dict[str, Any]
Handler = Callable[[Question], Any]


def main(start: str, *arguments: str) -> None:
    """Start the handler, report whether that worked, and answer questions until the socket closes."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    module, _, function = start.partition(":")
    try:
        handler: Handler = getattr(importlib.import_module(module), function)(*arguments)
    except Exception as error:
        send(channel, msgspec.json.encode(_failure(error)))
        return
    send(channel, msgspec.json.encode({"ok": None}))
    serve(channel, handler)
    os._exit(0)  # without the clean-up of libraries, which may hang


def serve(channel: socket.socket, handler: Handler) -> None:
    """Answer questions until the socket closes."""
    while True:
        try:
            question = msgspec.json.decode(receive(channel, LARGEST))
        except (EOFError, OSError):
            return
        send(channel, _answer(handler, question))


def _answer(handler: Handler, question: Question) -> bytes:
    try:
        body = msgspec.json.encode({"ok": handler(question)})
        if len(body) > LARGEST:
            raise ValueError(f"an answer of {len(body)} bytes is longer than {LARGEST}")
    except Exception as error:
        return msgspec.json.encode(_failure(error))
    return body


def _failure(error: Exception) -> dict[str, str]:
    """Describe an error; `kind` is empty unless it is one of ours, which is raised again on the other side."""
    if isinstance(error, RillflowError):
        return {"error": error.message, "hint": error.hint, "kind": type(error).__name__}
    return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR], "hint": "", "kind": ""}


if __name__ == "__main__":
    main(*sys.argv[1:])
