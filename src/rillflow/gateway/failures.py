"""Errors of calls, which each dialect writes in the shape of its provider."""

from __future__ import annotations

from rillflow.errors import RillflowError


class CallRefused(RillflowError):
    """A call that cannot be served. `code` and `param` are as in OpenAI's errors; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def session_gone(session: str) -> CallRefused:
    return CallRefused(f"session {session!r} is not open", status=404, code="session_not_found")


def session_late(session: str) -> CallRefused:
    return CallRefused(f"the deadline of session {session!r} has passed", status=504, code="deadline_exceeded")
