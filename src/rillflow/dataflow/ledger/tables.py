"""A struct for the rows of each table. They hold states and metadata, never tokens. `schema` has the tables."""

from __future__ import annotations

from functools import cache

import msgspec

from rillflow.types import Lane, Row

NEWEST = (1 << 62) - 1  # above every version and position
SUM = ""  # the name of the row that sums up the nodes which went long ago; no node has it


class Record(msgspec.Struct, frozen=True, gc=False):
    """A row of a table. Its fields are columns of the table, in the order in which `columns` names them."""

    @classmethod
    @cache
    def columns(cls, table: str = "") -> str:
        """The columns that a query must select, of the table with this alias."""
        prefix = f"{table}." if table else ""
        return ", ".join(f"{prefix}{name}" for name in cls.__struct_fields__)


class Group(Record, frozen=True):
    id: str
    lane: Lane
    round: int
    ord: int
    prompt: str
    planned: int
    state: str
    cause: str
    scoring: int


class Share(Record, frozen=True):
    grp: str
    producer: str
    stream: str
    ord: int
    state: str
    cause: str
    oldest: int
    newest: int
    mean: float
    std: float
    size: int
    samples: int
    tokens: int
    batch: str | None
    served: int
    held: int
    damaged: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.grp, self.producer, self.stream


class Task(msgspec.Struct, gc=False):
    """A task. Those of groups that are playing are kept in memory and change with their rows."""

    id: str
    grp: str
    place: int
    lane: Lane
    seed: int
    state: str
    attempt: str | None = None
    node: str | None = None
    ask: str | None = None
    home: str | None = None
    last_node: str | None = None
    returned_at: float | None = None
    leases: int = 0
    failures: int = 0
    returns: int = 0
    leased_at: float | None = None
    deadline: float = 0.0  # of its lease; in no table


TASK = (  # of `tasks t` and its group `g`
    "t.id, t.grp, t.place, g.lane, t.seed, t.state, t.attempt, t.node, t.ask, t.home, t.last_node, t.returned_at, "
    "t.leases, t.failures, t.returns, t.leased_at"
)


class Attempt(Record, frozen=True):
    """One lease of a task, whether it holds the task or has ended."""

    id: str
    task: Task
    node: str
    state: str = "held"
    cause: str = ""
    digest: str | None = None


class Sample(Record, frozen=True):
    """A sample's place, its payload's row and what of it the ledger knows."""

    grp: str
    place: int
    n: int
    policy: str
    unit: str
    segment: int
    offset: int
    length: int
    trained: int
    reward: float
    truncated: int
    agent: str

    @property
    def id(self) -> str:
        return f"{self.grp}.{self.place}.{self.n}"

    @property
    def row(self) -> Row:
        return Row(unit=self.unit, segment=self.segment, offset=self.offset, length=self.length)


class Extra(Record, frozen=True):
    """A row that a stage has added to a sample."""

    grp: str
    producer: str
    stream: str
    stage: str
    place: int
    n: int
    unit: str
    segment: int
    offset: int
    length: int

    @property
    def id(self) -> str:
        return f"{self.grp}.{self.place}.{self.n}"

    @property
    def row(self) -> Row:
        return Row(unit=self.unit, segment=self.segment, offset=self.offset, length=self.length)


class BatchRow(Record, frozen=True):
    """A batch of a trainer."""

    id: str
    policy: str
    attempt: str
    incarnation: str
    version: int
    state: str
    wanted: int
    least: int
    members: int
    parts: int
    complete: int
    produced: int | None
    deadline: float


class StageBatch(Record, frozen=True):
    id: str
    stream: str
    stage: str
    attempt: str
    state: str
    version: int
    deadline: float


class Policy(Record, frozen=True):
    name: str
    version: int
    highest: int
    steps: int
    incarnation: str | None


class StepRow(Record, frozen=True):
    """A committed step."""

    samples: int
    tokens: int
    reward: float
    staleness: float
    step_seconds: float
    wait_seconds: float


class Round(Record, frozen=True):
    id: int
    step: int
    version: int
    versions: str
    reward: float | None
    episodes: int
    failed: int
    planned: int


class Node(Record, frozen=True):
    name: str
    incarnation: str
    state: str
    seen: float
    version: int | None
    versions: str
    capacity: int
    stats: str
    held: int
    held_eval: int
    ends: float
    bad_ends: float
    bad_row: int
    pace: float | None
    made: float
    busy: float
    ended_at: float | None
    rate: float
    rate_at: float | None
    rate_accepted: int
    active: str
    leaving: int
    leave_at: float | None
    drain: float | None
    completed: int
    failed: int
    accepted: int
