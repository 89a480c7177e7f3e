"""The structs that cross a border between two processes. They hold data, never behaviour or open handles.

Arrays travel as little-endian bytes (`tokens` int32, `logprobs` float32, `versions` int32, `mask` uint8), so a
reader can map them without a copy; `column_dtype` is the one place that says which dtype a column has.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from rillflow.errors import ErrorBody

Lane = Literal["train", "eval"]
Phase = Literal["training", "finishing", "ended"]
FinishReason = Literal["stop", "length", "abort"]

COLUMNS: dict[str, str] = {
    "tokens": "<i4",  # prompt, tool and sampled ids of one root-to-leaf path
    "mask": "|u1",  # 1 where the token was sampled and trains in this sample
    "logprobs": "<f4",  # of the distribution that was sampled from (temperature, top-p, top-k); 0 where mask is 0
    "raw_logprobs": "<f4",  # of the untempered distribution; 0 where mask is 0
    "temperatures": "<f4",  # that `logprobs` can be recomputed with; 0 where they cannot (greedy, top-p, top-k)
    "versions": "<i4",  # policy version that sampled the token; -1 where mask is 0
    "rewards": "<f4",  # given to the answer that ends with the token, NaN elsewhere; absent where no answer has its own
    "transcript": "|u1",  # UTF-8 JSON of the episode's messages, on the first sample of a trajectory only
}
_OWN_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}\.(i4|i8|u1|f2|f4|f8)")


def column_dtype(name: str) -> str | None:
    """The dtype of a column: one of `COLUMNS`, or a stage's own, whose name ends in it (`values.f4`); else None."""
    if name in COLUMNS:
        return COLUMNS[name]
    return f"<{name[-2:]}".replace("<u1", "|u1") if _OWN_COLUMN.fullmatch(name) else None


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of everything that travels: keyword-only, immutable, unknown fields refused."""


# ---------------------------------------------------------------- tasks and trajectories


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
    """A node asks for up to `want` tasks, telling which version of each policy it serves now."""

    node: str
    incarnation: str
    want: int
    versions: dict[str, int]
    wait: float = 0.0


class TaskLeases(Wire, frozen=True):
    leases: list[TaskLease]
    heads: dict[str, int]
    phase: Phase


class Row(Wire, frozen=True):
    """Where a storage unit keeps one row of columns."""

    unit: str
    segment: int
    offset: int
    length: int


class SampleMeta(Wire, frozen=True):
    """What the ledger is told of a sample: everything but its tokens.

    `fork` says why its path left another one ("history": the agent's messages did; "template": the chat template wrote
    them anew), `seams` how often its sampling was cut and continued. `agent` is whom the calls said to be of, `turn`
    which of that agent's calls in the episode begins it, from 0.
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


class CompleteTask(Wire, frozen=True):
    """An episode has ended well; its samples are already durable in a storage unit."""

    task: str
    attempt: str
    node: str
    reward: float
    samples: list[SampleMeta]
    calls: int
    seconds: float
    metrics: dict[str, float] = {}


class FailTask(Wire, frozen=True):
    """An episode has ended badly; the ledger decides whether the task is retried."""

    task: str
    attempt: str
    node: str
    cause: str
    error: str


class Ack(Wire, frozen=True):
    """`accepted` is False where the news came too late (another attempt holds the task) and changes nothing."""

    accepted: bool
    reason: str = ""


class CompleteTasks(Wire, frozen=True):
    """Completions that travel together; each is taken or refused on its own."""

    tasks: list[CompleteTask]


class Taken(Wire, frozen=True):
    """The answer to one of several: exactly one of the two."""

    ack: Ack | None = None
    error: ErrorBody | None = None


class TasksTaken(Wire, frozen=True):
    """In the order of what was sent."""

    taken: list[Taken]


class Heartbeat(Wire, frozen=True):
    """A node lives and still plays these attempts."""

    node: str
    incarnation: str
    attempts: list[str]
    versions: dict[str, int]
    capacity: int
    stats: dict[str, float] = {}


class HeartbeatReply(Wire, frozen=True):
    """`lost`: attempts whose lease is gone; the node stops playing them."""

    lost: list[str]
    heads: dict[str, int]
    phase: Phase


# ---------------------------------------------------------------- batches


class LeaseBatch(Wire, frozen=True):
    """A trainer at `version` asks for a batch of `groups` groups; waits up to `wait` seconds for more of them.

    A batch is served whole (`least` 0), or as a stream: each ask under the same attempt names the groups it `have`s
    and is answered with the next ones as soon as `least` of them are ready. Ranks that share a trainer ask under the
    same attempt and each get their own part of every answer, balanced by tokens.
    """

    policy: str
    incarnation: str
    attempt: str
    groups: int
    version: int
    wait: float
    have: int = 0
    least: int = 0
    rank: int = 0
    ranks: int = 1


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
    """What was asked for of a batch: `samples` are those after the groups that the asker had, `groups` all so far.

    `complete` says that nothing more will be added.
    """

    id: str
    attempt: str
    policy: str
    version: int
    samples: list[BatchSample]
    seconds: float
    groups: int = 0
    complete: bool = True


class RenewBatch(Wire, frozen=True):
    """The holder still works on the batch: its lease has its full time again."""

    batch: str
    attempt: str


class BatchReply(Wire, frozen=True):
    """`batch` is None when none became ready in time or when the run has ended; `waiting_for` says which."""

    batch: Batch | None
    phase: Phase
    waiting_for: str = ""


class CommitBatch(Wire, frozen=True):
    """The optimizer step on `batch` produced `version`, already published. Trained and version move together.

    `restorable` is the oldest version that this trainer keeps a checkpoint of: what went into it or before it is
    never asked for again.
    """

    policy: str
    incarnation: str
    batch: str
    attempt: str
    version: int
    metrics: dict[str, float]
    step_seconds: float
    wait_seconds: float
    restorable: int = 0


class JoinTrainer(Wire, frozen=True):
    """A trainer starts from `checkpoint` (the version it restored; 0 for the initial weights).

    `published` is the highest version in its weight store: a version that was published but never committed died
    with the trainer that made it, and only the store knows of it.
    """

    policy: str
    incarnation: str
    checkpoint: int
    published: int = 0


class TrainerJoined(Wire, frozen=True):
    """Versions after `version` are orphaned; `highest` was ever used; `steps` are committed on the live line."""

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
    wait: float


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


# ---------------------------------------------------------------- storage units


class PutRows(Wire, frozen=True):
    rows: list[dict[str, bytes]]


class RowsPut(Wire, frozen=True):
    rows: list[Row]


class GetRows(Wire, frozen=True):
    rows: list[Row]
    columns: list[str]


class RowsGot(Wire, frozen=True):
    rows: list[dict[str, bytes]]


class UnitInfo(Wire, frozen=True):
    """A storage unit: `unit` was drawn once and is its name for good, `url` is where it listens now.

    `path` is the folder of segments: who can open it on the own host reads and writes there instead of asking; it
    is empty where a unit has none. `load` is the bytes that wait or were written lately, `free` the bytes left.
    """

    unit: str
    path: str
    url: str = ""
    kind: str = "files"
    load: float = 0.0
    free: int = 0


class UnitBeat(Wire, frozen=True):
    """A unit lives. `dropped` are the segments it was told to drop and has; `closed` those of the idle ones it was
    asked about that nobody will ever write into again."""

    info: UnitInfo
    dropped: list[int] = []
    closed: list[int] = []


class UnitBeatReply(Wire, frozen=True):
    """`drop`: segments that nobody will ever ask for again; `idle`: those that could go if nobody writes into them."""

    drop: list[int]
    idle: list[int] = []


class Units(Wire, frozen=True):
    """The units of a run that were heard of lately, the least loaded first."""

    units: list[UnitInfo]


class LoseRows(Wire, frozen=True):
    """Rows that could not be read as they were written: they are set aside and their episodes played again."""

    rows: list[Row]
    reason: str


class DropSegments(Wire, frozen=True):
    segments: list[int]


# ---------------------------------------------------------------- engine


class Sampling(Wire, frozen=True):
    """How tokens are drawn. `top_k` 0 and `top_p` 1 switch those cuts off; `seed` None draws a fresh one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None


class GenerateRequest(Wire, frozen=True):
    """Token ids in. `group` lets an engine find requests that share their prompt."""

    id: str
    tokens: list[int]
    sampling: Sampling
    group: str = ""


class Chunk(Wire, frozen=True):
    """Tokens out, all sampled by one `version`. The stop token, when sampled, is part of `tokens`.

    `logprobs` are of the distribution that was sampled from, `raw_logprobs` of the untempered one. `seam` says why
    sampling was cut before the first of these tokens and went on from the ids produced so far; empty where it was not.
    """

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    version: int
    finish: FinishReason | None = None
    seam: str = ""


class EngineStats(Wire, frozen=True):
    version: int
    running: int
    waiting: int
    slots: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    steps: int
    loads: int
    load_seconds: float = 0.0  # in which no token could be sampled because weights were changed


class AskTurn(Wire, frozen=True):
    """An engine of a policy wants to change its weights now, or (`done`) has done it."""

    policy: str
    engine: str
    done: bool = False
    wait: float = 0.0


class TurnReply(Wire, frozen=True):
    """Whether it may; if not, it asks again."""

    granted: bool


class EngineInfo(Wire, frozen=True):
    """A process that samples for others: where it listens and which version of each policy it serves now.

    `paused` names why it does not sample at present; empty where it does.
    """

    name: str
    url: str
    versions: dict[str, int]
    context: int
    slots: int
    running: int = 0
    waiting: int = 0
    paused: str = ""


class Engines(Wire, frozen=True):
    """The engine processes of a run that were heard of lately."""

    engines: list[EngineInfo]


# ---------------------------------------------------------------- status, for people and supervisors


class StopRun(Wire, frozen=True):
    """Ends the run; what is outstanding stays in the ledger, so that a resumed run goes on with it."""

    reason: str = "stopped"


class Evaluation(Wire, frozen=True):
    """Mean reward on held-out prompts, asked for when the policy stood at `version`."""

    version: int
    reward: float
    episodes: int
    failed: int


class PolicyStatus(Wire, frozen=True):
    """One policy's stream: how far its trainer is and what it waits for."""

    version: int
    steps: int
    total_steps: int
    reward: float | None
    staleness: float
    wait_fraction: float
    samples_per_second: float
    ready: int


class Status(Wire, frozen=True):
    """One look at a run, as the progress view shows it. The plain numbers are the first policy's."""

    phase: Phase
    reason: str
    steps: int
    total_steps: int
    versions: dict[str, int]
    reward: float | None
    samples_per_second: float
    staleness: float
    wait_fraction: float
    counts: dict[str, int]
    evaluations: list[Evaluation]
    nodes: int
    waits: list[str]
    policies: dict[str, PolicyStatus] = {}
    units: int = 0
