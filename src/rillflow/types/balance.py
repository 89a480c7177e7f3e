"""The balance report: whether the pool of rollout nodes fits what the trainer takes. `dataflow.balance` makes it.

Counts are of samples. A step's time is all of it, the wait for its batch included.
"""

from __future__ import annotations

from typing import Literal

from rillflow.types.base import Finite, Wire

Branch = Literal["grow", "shrink", "hold"]
NodeState = Literal["healthy", "suspect", "gone"]


class Window(Wire, frozen=True):
    """The versions and the time that a report is about. `counted` of its `steps` are in the averages. `wait_fraction`
    is at most 0.95."""

    since: int
    steps: int
    counted: int
    wall_seconds: Finite
    eval_seconds: Finite
    training_seconds: Finite
    step_seconds: Finite | None
    batch_wait_seconds: Finite | None
    wait_fraction: Finite | None


class Production(Wire, frozen=True):
    """`entered` passed the filters; a sample counts once for every stream it enters. `stale_skipped` is advisory."""

    gpus: int
    produced: int
    entered: int
    accept_rate: Finite | None
    consumed: int
    stale_skipped: int
    stale_rate: Finite | None
    throughput_per_gpu: Finite
    produce_consume_ratio: Finite | None


class Decision(Wire, frozen=True):
    """`target` is the pool size, in GPUs, that would fit; `delta` what to add or, below 0, to retire."""

    branch: Branch
    target: int
    delta: int
    weight_transfer: bool = False


class NodeReport(Wire, frozen=True):
    """`accepted` came in time and was taken, before the filters. Throughput is produced samples a second."""

    id: str
    gpus: int
    produced: int
    accepted: int
    accept_rate: Finite | None
    throughput_per_gpu: Finite
    state: NodeState


class Report(Wire, frozen=True):
    """One window of one policy."""

    policy: str
    version: int
    time: Finite
    window: Window
    production: Production
    decision: Decision
    nodes: list[NodeReport]


class Balance(Wire, frozen=True):
    """The last report, and the window since, which is not full yet."""

    latest: Report | None
    current: Report


class LedgerBalances(Wire, frozen=True):
    """The balance of each ledger of a run. `dataflow.balance.joined` makes one of them."""

    ledgers: list[Balance]
