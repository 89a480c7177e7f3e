"""A request on its way through a server engine, and what comes back for it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from weakref import ref

from rillflow.engine.progress import Progress
from rillflow.engine.stream import Stream
from rillflow.errors import EngineLost
from rillflow.types import Chunk, FinishReason, GenerateRequest, Sampling

TRIES = 8  # of an answer that the server cuts unasked, without one token


class Part(NamedTuple):
    """Tokens of one attempt. `finish` None: there is more to come; `abort`: the server was told to cut it."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish: FinishReason | None = None


def is_scored(sampling: Sampling) -> bool:
    """Whether the model's own log-probs of an answer have to be asked for once it is there: servers tell those of the
    distribution that they drew from, and a cut or a grammar leaves no way back from these."""
    return is_cut(sampling) or sampling.grammar is not None


def is_cut(sampling: Sampling) -> bool:
    """Return whether tokens are drawn from less than the tempered distribution."""
    return sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0)


class Call:
    """How far it is. The stream is held weakly: a caller that drops it thereby aborts the request."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.progress = Progress(request, context)
        self.stream: ref[Stream]
        self.task: asyncio.Task[None]
        self.limit: asyncio.Timeout | None = None  # of the running attempt
        self.cause = ""  # why the running attempt is being cut
        self.owed = False  # it was cut by new weights and has had no token since
        self.whole = is_scored(request.sampling)  # it comes at its end alone

    def check_end(self, last: Part) -> None:
        """A late cut may still hit the next attempt. A server that goes on cutting does not sample this answer."""
        self.progress.cuts += last.finish == "abort" and not self.cause
        if self.progress.cuts >= TRIES:
            raise EngineLost("the server gives up an answer that nobody has cut", "see its log")

    def end_attempt(self) -> None:
        """The cause of a cut is for the tokens of the next attempt, not for the last ones of this."""
        self.limit = None
        if self.cause:
            self.progress.cause = self.cause
            self.owed = self.cause == "weights"
            self.cause = ""

    def push(self, chunk: Chunk) -> None:
        stream = self.stream()
        if stream is not None:
            stream.push(chunk)

    def fail(self, error: Exception) -> None:
        stream = self.stream()
        if stream is not None:
            stream.fail(error)

    def abort(self) -> None:
        self.task.cancel()
