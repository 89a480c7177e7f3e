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
    ├── SandboxError           the sandbox itself failed, so the code has no verdict
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
    """Base of all errors that a user may see: `message` says what happened, `hint` what to do in this case.

    `status` is the HTTP status under which it crosses processes; `advice` says what to do where `hint` is empty.

    Example:

        try:
            rillflow.run("mine.yaml")
        except rillflow.RillflowError as error:
            print(error.message, error.hint)
    """

    status = 500
    advice = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(RillflowError):
    """A recipe, an override or a function that it names is wrong. Nothing was started.

    Example:

        try:
            rillflow.load_recipe("quickstart", ["trainer.step=3"])
        except rillflow.ConfigError as error:
            print(error)  # unknown key policies.agent.trainer.step; did you mean 'steps'?
    """

    status = 400
    advice = (
        "Correct the key or argument that the message names. `rillflow run RECIPE --dry-run` prints the "
        "resolved recipe without running it."
    )


class DataError(RillflowError):
    status = 400
    advice = (
        "Check the file, data set or generator that the message names: its path, its format, and that it "
        "yields at least one prompt."
    )


class StorageError(RillflowError):
    status = 500
    advice = "Look at the disk that the message names: its mount, its rights and the kernel's log."


class CorruptData(StorageError):
    advice = "Check the disk. Lost payloads are counted and their tasks played again; weights are pulled again."


class DiskFault(StorageError):
    status = 503
    advice = "Nothing to do at first: the call is retried. If it goes on, check the disk."


class DiskFull(StorageError):
    status = 507
    advice = (
        "Free space on the disk that holds the run. A run that waits goes on by then; one that has ended "
        "goes on with `rillflow resume RUN`."
    )


class WireError(RillflowError):
    status = 502
    advice = "See the logs of both processes in `RUN/logs`."


class Unauthorized(WireError):
    status = 401
    advice = "Pass a token of this run: `rillflow token RUN`, in `RILLFLOW_TOKEN` or by `--token-file`."


class Forbidden(WireError):
    status = 403
    advice = "Use a token of the scope that the message names: `rillflow token RUN SCOPE`."


class BadRequest(WireError):
    status = 400
    advice = "Correct the request. If both sides are Rillflow, install the same version on both."


class Unavailable(WireError):
    status = 503
    advice = (
        "Nothing to do at first: the call is retried. If it goes on, check that the peer runs (`rillflow "
        "status RUN`) and can be reached."
    )


class DeadlineExceeded(WireError):
    status = 504
    advice = "Find out what the message says it waited for. Raise the deadline if the wait is expected."


class LeaseLost(WireError):
    status = 409
    advice = (
        "Nothing to do: the task or batch has been given to another worker. If it happens often, raise "
        "`dataflow.task_lease` or look for a stalled process."
    )


class EngineError(RillflowError):
    status = 500
    advice = "See the engine's log in `RUN/logs`. The episode is retried elsewhere."


class ContextOverflow(EngineError):
    status = 400
    advice = "Shorten the prompt, lower `sampling.max_tokens`, or raise `engine.context`."


class EngineLost(EngineError):
    status = 503
    advice = "Nothing to do: the gateway continues on another engine. If none is left, see the engine's log."


class QueueFull(EngineError):
    status = 429
    advice = "Nothing to do at first: clients retry. Lower `rollout.episodes`, or add engines."


class WorkflowError(RillflowError):
    """A workflow raised, hung or called no model. Its episode fails and is played again elsewhere.

    Example:

        async def play(episode):
            if "question" not in episode.payload:
                raise rillflow.WorkflowError("the prompt has no question", "check data.prompts")
    """

    advice = "Correct the workflow: the traceback is in the message. `rillflow try RECIPE` plays one episode."


class RewardError(RillflowError):
    """No reward could be computed. The episode is played again; it is never counted as 0.

    Example:

        @rillflow.reward
        def exact(payload, answer):
            if "answer" not in payload:
                raise rillflow.RewardError("the prompt has no right answer")
            return float(answer == payload["answer"])
    """

    advice = "Correct the reward function: the traceback is in the message. `rillflow try RECIPE` calls it once."


class ToolError(RillflowError):
    """A tool cannot do what the model asked for. The model reads the message and the episode goes on.

    Example:

        @rillflow.tool
        async def count(box: str, episode: rillflow.Episode) -> int:
            if box not in episode.payload["stock"]:
                raise rillflow.ToolError(f"there is no {box} box")
            return episode.payload["stock"][box]
    """

    status = 400
    advice = "Nothing to do if the model's call was wrong: the model reads the message. Otherwise correct the tool."


class SandboxError(RillflowError):
    status = 500
    advice = "Run `rillflow sandbox`, which checks the isolation that this machine offers."


class EnvironmentLost(RillflowError):
    status = 502
    advice = (
        "Check the environment's server; the episode is played again. `rillflow play ENVIRONMENT` steps through one."
    )


class WeightsError(RillflowError):
    advice = "Check the model or version that the message names. A version that is missing is pulled again."


class CheckpointError(RillflowError):
    advice = "Restore a checkpoint from a copy. Without one, remove the trainer's folder of checkpoints to begin again."


class GraphError(RillflowError):
    advice = "Correct the step graph; `rillflow graph RECIPE` plans it without running anything."


class RunError(RillflowError):
    """A run cannot be started, resumed or finished. `rillflow resume` goes on with it.

    Example:

        try:
            run = rillflow.run("quickstart")
        except rillflow.RunError as error:
            print(error.message, error.hint)
    """

    advice = "See the process that the message names in `RUN/logs`, then `rillflow resume RUN`."


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return the beginning of a hint that names the valid name nearest to `name`; empty if none is near."""
    import difflib  # needed only where something is wrong

    close = difflib.get_close_matches(name, list(valid), 1)
    return f"did you mean {close[0]!r}? " if close else ""


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error response."""

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
