"""The error tree. Every error says what happened and, in its hint, what to do next.

    RillflowError
    ├── ConfigError            a recipe or an override is wrong
    ├── DataError              a prompt source cannot be read or is empty
    ├── StorageError           a disk refused or returned something else than was written
    │   ├── CorruptData        a checksum or hash does not match
    │   ├── DiskFault          a disk failed in a way that may pass: nothing was acknowledged (retried)
    │   └── DiskFull           no space left: nothing was acknowledged
    ├── WireError              a call between two processes failed
    │   ├── Unauthorized       no token, or an unknown one
    │   ├── Forbidden          a token of another scope than the route needs (403)
    │   ├── BadRequest         the body does not match the route's type, or a limit was passed
    │   ├── Unavailable        the peer cannot be reached or asks to come back later (retried)
    │   ├── DeadlineExceeded   the deadline of a call or a wait has passed
    │   └── LeaseLost          the lease named in the call is no longer held (409)
    ├── EngineError            a model could not generate
    │   ├── ContextOverflow    prompt and answer do not fit into the context
    │   ├── EngineLost         the engine has gone, or lost what it sampled: go on elsewhere
    │   └── QueueFull          the engine's bounded queue is full
    ├── WorkflowError          the user's workflow raised, hung or called no model
    ├── RewardError            no reward could be computed; it is never counted as 0
    ├── ToolError              a tool could not do what a model asked for; the model reads why
    ├── SandboxError           the sandbox itself failed: there is no verdict, not a bad one
    ├── EnvironmentLost        an environment has gone or broke its protocol
    ├── WeightsError           weights are missing or do not fit the model
    ├── CheckpointError        a checkpoint is missing, torn or corrupt
    ├── GraphError             a step graph cannot be planned, or a node broke what it declares
    └── RunError               a run cannot be started, resumed or finished

Errors cross process borders by the name of their class: `to_body` on the server, `from_body` in the client.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class RillflowError(Exception):
    """Base of all errors that a user may see. `status` is the HTTP status it travels under."""

    status = 500

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(RillflowError):
    status = 400


class DataError(RillflowError):
    status = 400


class StorageError(RillflowError):
    status = 500


class CorruptData(StorageError):
    pass


class DiskFault(StorageError):
    status = 503


class DiskFull(StorageError):
    status = 507


class WireError(RillflowError):
    status = 502


class Unauthorized(WireError):
    status = 401


class Forbidden(WireError):
    status = 403


class BadRequest(WireError):
    status = 400


class Unavailable(WireError):
    status = 503


class DeadlineExceeded(WireError):
    status = 504


class LeaseLost(WireError):
    status = 409


class EngineError(RillflowError):
    status = 500


class ContextOverflow(EngineError):
    status = 400


class EngineLost(EngineError):
    status = 503


class QueueFull(EngineError):
    status = 429


class WorkflowError(RillflowError):
    pass


class RewardError(RillflowError):
    pass


class ToolError(RillflowError):
    status = 400


class SandboxError(RillflowError):
    status = 500


class EnvironmentLost(RillflowError):
    status = 502


class WeightsError(RillflowError):
    pass


class CheckpointError(RillflowError):
    pass


class GraphError(RillflowError):
    pass


class RunError(RillflowError):
    pass


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return the beginning of a hint that names the valid name nearest to `name`; empty where none is near."""
    import difflib  # needed only where something is wrong

    close = difflib.get_close_matches(name, list(valid), 1)
    return f"did you mean {close[0]!r}? " if close else ""


class ErrorBody(msgspec.Struct, frozen=True):
    """How an error travels."""

    kind: str
    message: str
    hint: str = ""


def _tree(root: type[RillflowError]) -> dict[str, type[RillflowError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


KINDS: dict[str, type[RillflowError]] = _tree(RillflowError)


def to_body(error: RillflowError) -> ErrorBody:
    return ErrorBody(kind=type(error).__name__, message=error.message, hint=error.hint)


def from_body(body: ErrorBody) -> RillflowError:
    """Rebuild the error; a kind this version does not know becomes a plain WireError."""
    return KINDS.get(body.kind, WireError)(body.message, body.hint)
