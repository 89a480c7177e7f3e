"""Tasks, which nodes lease and play, and batches, which trainers and stages lease and commit."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.errors import ErrorBody
from rillflow.types.balance import Report
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

    `trajectory` is for people, if the node sends one (`storage.trajectory_format.encode_body`). `calls` is the
    number of its model calls.
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


# ---------------------------------------------------------------- batches


class LeaseBatch(Wire, frozen=True):
    """A trainer at `version` asks for a batch of `groups` groups; waits up to `wait` seconds for more of them.

    A batch is served whole (`least` 0), or as a stream: each ask under the same attempt names the groups it `have`s
    and is answered with the next ones as soon as `least` of them are ready. Ranks that share a trainer ask under the
    same attempt and each get their own part of every answer, balanced by tokens. `spent` tells one of several ledgers
    that none of them has anything left.
    """

    policy: str
    incarnation: str
    attempt: str
    groups: int
    version: int
    wait: Finite
    have: int = 0
    least: int = 0
    rank: int = 0
    ranks: int = 1
    spent: bool = False


class BatchSample(Wire, frozen=True):
    """One training row by reference, with the statistics of its group over the episodes of the same policy.

    `policy` sampled it; `staleness` counts versions of that policy. `extra` are rows of columns that stages added.
    `member` is the place of its group in the batch; `agent` and `turn` are as in `SampleMeta`. Samples of one member
    with the same number `alike` are those that are compared with each other.
    """

    id: str
    row: Row
    tokens: int
    trained: int
    reward: float
    group: str
    group_mean: float
    group_std: float
    group_size: int
    staleness: int
    truncated: bool
    policy: str = ""
    task: str = ""
    extra: list[Row] = []
    replayed: bool = False
    member: int = 0
    agent: str = ""
    turn: int = 0
    alike: int = 0


class Batch(Wire, frozen=True):
    """A part of a batch: `samples` are those after the groups that the asker had, `groups` counts all so far.

    `complete` says that nothing more will be added. `keep` are tasks whose trajectories may be kept for people: the
    trainer reports with its commit what it computed for their tokens.
    """

    id: str
    attempt: str
    policy: str
    version: int
    samples: list[BatchSample]
    seconds: float
    groups: int = 0
    complete: bool = True
    keep: list[str] = []


class RenewBatch(Wire, frozen=True):
    """A request to renew the lease of a batch."""

    batch: str
    attempt: str


class BatchReply(Wire, frozen=True):
    """`batch` is None when none became ready in time or when the run has ended; `waiting_for` says which. `spent`: all
    prompts of this ledger have been admitted and have ended."""

    batch: Batch | None
    phase: Phase
    waiting_for: str = ""
    spent: bool = False


class KeptTokens(Wire, frozen=True):
    """Values that a trainer computed for trained tokens of a sample: number `number` of the task at `place` in the
    group of the batch's `member`.

    `at` are the tokens' places in the sample (i4), `advantages` and `logprobs` (f4) their values, the log-probs by the
    weights before the step's first update.
    """

    member: int
    place: int
    number: int
    at: bytes
    advantages: bytes
    logprobs: bytes


class StepPart(Wire, frozen=True):
    """What one of several ledgers says of a step: the numbers of its own part of the batch.

    `reward` and `flat` are means over the `played` groups that became complete since the last step, `staleness` over
    the samples, `measured` over the `groups` of the part. `counters` are those of the ledger, `balance` is its latest
    report.
    """

    groups: int
    samples: int
    tokens: int
    played: int
    reward: Finite
    flat: Finite
    staleness: Finite
    stalest: int
    replayed: int
    measured: dict[str, Finite]
    counters: dict[str, int]
    balance: Report | None = None


class CommitBatch(Wire, frozen=True):
    """The optimizer step on `batch` produced `version`, already published. Trained and version move together.

    `restorable` is the oldest version of which this trainer keeps a checkpoint: the batches of it and of earlier
    versions are never asked for again. `kept` is only for the trajectories that people read.

    A run of several ledgers commits to each of them. `batch` is empty for a ledger that gave nothing to the step.
    `parts` are those of the other ledgers, which commit before the first one.
    """

    policy: str
    incarnation: str
    batch: str
    attempt: str
    version: int
    metrics: dict[str, Finite]
    step_seconds: Finite
    wait_seconds: Finite
    restorable: int = 0
    kept: list[KeptTokens] = []
    parts: list[StepPart] = []


class Committed(Ack, frozen=True):
    """The answer to a commit. With several ledgers, all but the first one set `part`."""

    part: StepPart | None = None


class JoinTrainer(Wire, frozen=True):
    """A trainer starts from `checkpoint` (the version it restored; 0 for the initial weights).

    `published` is the highest version in its weight store: a version that was published but never committed died
    with the trainer that made it, and only the store knows of it. `weights` is where the trainer serves its weights
    itself; empty where they are in the run's folder.
    """

    policy: str
    incarnation: str
    checkpoint: int
    published: int = 0
    weights: str = ""


class TrainerJoined(Wire, frozen=True):
    """The state that a trainer joins. Versions after `version` are orphaned; `highest` is the highest version ever
    used; `steps` are committed on the live line."""

    version: int
    highest: int
    steps: int
    orphaned: list[int]
    rolled_back: int


class LeaseStage(Wire, frozen=True):
    """A worker of a stage before the update (log-probs, a reward model) asks for up to `groups` groups."""

    policy: str
    stage: str
    attempt: str
    groups: int
    wait: Finite


class SampleColumns(Wire, frozen=True):
    """Columns that a stage has computed for a sample, already durable in a storage unit."""

    sample: str
    row: Row


class CommitStage(Wire, frozen=True):
    """The stage has handled `batch`; each sample at most once, and only samples of the batch."""

    policy: str
    stage: str
    batch: str
    attempt: str
    columns: list[SampleColumns]
