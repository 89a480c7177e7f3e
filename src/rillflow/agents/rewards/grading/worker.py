"""The program that grades: a JSON line in, `{"name", "arguments", "seconds"}`; a JSON line out, `value` or `error`.

Invariant: it ends itself when a request takes longer than it may, even within C code and with nobody left to kill it,
and when its standard input closes.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from typing import Any

import msgspec

GRADERS = {  # modules with a function `grade`
    "math": "rillflow.agents.rewards.grading.math_answers",
    "pattern": "rillflow.agents.rewards.grading.patterns",
    "reasoning_gym": "rillflow.agents.rewards.grading.gym_scores",
}
OUT_OF_TIME = signal.SIGPROF
LOAD = 0.0  # seconds: load the grader, grade nothing
MEMORY = 4 << 30  # bytes of address space


class Order(msgspec.Struct, frozen=True):
    """`seconds` of computing that grading may take."""

    name: str
    seconds: float
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """Exactly one of the two."""

    value: float | None = None
    error: str | None = None


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what graders print is no reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)  # which ends the process, whatever it is in the middle of
    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Order)
    for line in sys.stdin.buffer:
        replies.write(encoder.encode(_reply(decoder.decode(line))) + b"\n")


def _reply(order: Order) -> Reply:
    try:
        module = importlib.import_module(GRADERS[order.name])
        if order.seconds == LOAD:
            return Reply(value=0.0)
        signal.setitimer(signal.ITIMER_PROF, order.seconds)  # of computing: a busy machine is nobody's fault
        try:
            return Reply(value=float(module.grade(**order.arguments)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (Exception, RecursionError) as error:
        return Reply(error=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
