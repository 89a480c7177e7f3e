"""What the OpenAI dialects share: the shape of errors and of server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.errors import ContextOverflow, RillflowError
from rillflow.gateway.failures import CallRefused

DONE = b"data: [DONE]\n\n"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_body(error: RillflowError) -> dict[str, Any]:
    """The provider's shape: clients choose their exception by status and `code`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code, param = _CODES.get(error.status), None
    if isinstance(error, ContextOverflow):
        code, param = "context_length_exceeded", "messages"
    elif isinstance(error, CallRefused):
        code, param = error.code or code, error.param
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(error: RillflowError) -> bytes:
    """How a stream that has begun says that it was cut."""
    return event(error_body(error))
