"""Tasks and trajectories: what nodes lease, play and push."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.errors import ErrorBody
from rillflow.types.base import Finite, Lane, Phase, Wire, new_attempt
from rillflow.types.units import Row


class Prompt(Wire, frozen=True):
    """A dataset row; `source` names where it came from when a run has several sources."""

    id: str
    payload: dict[str, Any]
    source: str = ""


class Task(Wire, frozen=True):
    """One episode to run. `seed` depends on the run, the group and the place alone, never on the attempt."""

    id: str
    prompt: Prompt
    group: str
    place: int
    lane: Lane
    seed: int


class TaskLease(Wire, frozen=True):
    """The right to play `task` until `seconds` from now, renewed by heartbeats that name `attempt`."""

    task: Task
    attempt: str
    seconds: float


class LeaseTasks(Wire, frozen=True):
    """A node's request for up to `want` tasks, with the version of each policy that it serves.

    Repeated under the same `attempt`, it returns the same leases, as long as the node holds them.
    """

    node: str
    incarnation: str
    want: int
    versions: dict[str, int]
    wait: Finite = 0.0
    attempt: str = msgspec.field(default_factory=new_attempt)


class TaskLeases(Wire, frozen=True):
    leases: list[TaskLease]
    heads: dict[str, int]
    phase: Phase


class SampleMeta(Wire, frozen=True):
    """The metadata of a sample: everything but its tokens.

    `fork` says why its path left another one ("history": the agent's messages differ; "template": the chat template
    rendered them differently). `seams` counts how often its sampling was cut and continued. `agent` is the agent named
    in its calls, `turn` the number of that agent's call that begins the sample, from 0.
    """

    policy: str
    row: Row
    tokens: int
    trained: int
    oldest: int
    newest: int
    reward: float
    truncated: bool = False
    fork: str = ""
    seams: int = 0
    agent: str = ""
    turn: int = 0


MODEL_WAIT = "waiting for the model's answer"  # in the error of an episode whose deadline passed during a model call
SLOW_TOOL = "slow tool "  # begins the kind of a UserError that counts the calls of a tool at their deadline


class UserError(Wire, frozen=True):
    """An error of user code that was seen `count` times: in a `kind` of code (`workflow_error`, `tool count`), at the
    same lines. `trace` is its traceback; it is empty if the ledger has it already."""

    kind: str
    where: str
    error: str
    trace: str = ""
    count: int = 1


class CompleteTask(Wire, frozen=True):
    """An episode has a reward; its samples are already durable in a storage unit.

    The ledger checks its numbers, not their types: a number that is not finite must not refuse the other completions of
    the call. `notes` are findings for people about how agents play, by subject; the run reports each subject once.
    `end` is how the episode ended, if without an answer: the recipe's `ends` has its reward. `errors` are those that
    the node has seen in user code since its last report.
    """

    task: str
    attempt: str
    node: str
    reward: float
    samples: list[SampleMeta]
    calls: int
    seconds: float
    metrics: dict[str, float] = {}
    notes: dict[str, str] = {}
    end: str = ""
    errors: list[UserError] = []


class FailTask(Wire, frozen=True):
    """The report of a failed episode; the ledger decides whether the task is retried.

    `trajectory` is for people, if the node sends one (`storage.trajectories.encode_body`). The episode made `calls`
    model calls.
    """

    task: str
    attempt: str
    node: str
    cause: str
    error: str
    errors: list[UserError] = []
    trajectory: bytes = b""
    calls: int = 0


class Ack(Wire, frozen=True):
    """`accepted` is false if the report came too late (another attempt holds the task) and changed nothing."""

    accepted: bool
    reason: str = ""


class CompleteTasks(Wire, frozen=True):
    """Completions that travel together; each is taken or refused on its own."""

    tasks: list[CompleteTask]


class Taken(Wire, frozen=True):
    """The answer to one completion: exactly one of the two."""

    ack: Ack | None = None
    error: ErrorBody | None = None


class TasksTaken(Wire, frozen=True):
    """The answers, in the order of the completions."""

    taken: list[Taken]
