"""The structs that cross a border between two processes. They hold data, never behaviour or open handles.

Arrays travel as little-endian bytes (`tokens` int32, `logprobs` float32, `versions` int32, `mask` uint8), so a
reader can map them without a copy; `COLUMNS` is the one place that says which dtype a column has.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

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
    "transcript": "|u1",  # UTF-8 JSON of the episode's messages, on the first sample of a trajectory only
}


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of everything that travels: keyword-only, immutable, unknown fields refused."""


# ---------------------------------------------------------------- tasks and trajectories


class Prompt(Wire, frozen=True):
    """A dataset row."""

    id: str
    payload: dict[str, Any]


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
    """What the ledger knows of a sample: everything but its tokens."""

    policy: str
    row: Row
    tokens: int
    trained: int
    oldest: int
    newest: int
    reward: float
    truncated: bool = False


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
    """A trainer at `version` asks for `groups` complete groups; waits up to `wait` seconds for them."""

    policy: str
    incarnation: str
    attempt: str
    groups: int
    version: int
    wait: float


class BatchSample(Wire, frozen=True):
    """One training row by reference, with the statistics of its group."""

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


class Batch(Wire, frozen=True):
    id: str
    attempt: str
    policy: str
    version: int
    samples: list[BatchSample]
    seconds: float


class BatchReply(Wire, frozen=True):
    """`batch` is None when none became ready in time or when the run has ended; `waiting_for` says which."""

    batch: Batch | None
    phase: Phase
    waiting_for: str = ""


class CommitBatch(Wire, frozen=True):
    """The optimizer step on `batch` produced `version`, already published. Trained and version move together."""

    policy: str
    incarnation: str
    batch: str
    attempt: str
    version: int
    metrics: dict[str, float]
    step_seconds: float
    wait_seconds: float


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
    """`path` is the folder of segments: a reader that can open it on its own host maps it instead of asking."""

    unit: str
    path: str


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

    `logprobs` are of the distribution that was sampled from, `raw_logprobs` of the untempered one.
    """

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    version: int
    finish: FinishReason | None = None


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


class Status(Wire, frozen=True):
    """One look at a run, as the progress view shows it."""

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
