"""Balance reports of a ledger: made after every `balance_every` versions of its first policy, in the transaction of the
commit.

The mark at which the present window began and the latest report lie in the ledger, so a restart changes neither; a
time in which no service ran is not part of any window.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rillflow.dataflow.balance import (
    Counts,
    Look,
    Mark,
    NodeLook,
    Span,
    Step,
    join_reports,
    joined,
    make_report,
    mark_of,
)
from rillflow.dataflow.ledger.database import Base, Part, Value, snapshot
from rillflow.dataflow.ledger.shares import ENTERED
from rillflow.errors import CorruptData, RunError
from rillflow.types.balance import Balance, NodeReport, Report
from rillflow.types.base import json_decoder

Kept = TypeVar("Kept", Mark, Report)

LATEST, MARK = "balance.latest", "balance.mark"
_MOST_GPUS = 4096


class Reads(Protocol):
    """The queries of a report."""

    def all(self, query: str, values: Sequence[Value] = ()) -> list[sqlite3.Row]: ...

    def value(self, query: str, values: Sequence[Value] = ()) -> Any: ...


class Balances(Part):
    """The reports of one ledger. `every` counts live versions of `policy`."""

    def __init__(self, base: Base, policy: str, every: int) -> None:
        super().__init__(base)
        self._policy = policy
        self._every = every

    def open(self) -> None:
        """Called before nodes get their grace: when they were last heard of tells how long no service ran."""
        now, mark = self._clock.now(), _read(self._db, MARK, Mark)
        if mark is None:
            self._keep(MARK, mark_of(self._look(Mark(time=now, version=0), now)))
            return
        down = max(now - _last_news(self._db, mark), 0.0)
        self._keep(MARK, msgspec.structs.replace(mark, opened=now, down=mark.down + down))

    def after_commit(self, policy: str, others: Sequence[Report] = ()) -> None:
        """Make the report that is due, once its window is full. `others` are the latest reports of the other ledgers:
        the line of metrics is about the whole run."""
        if policy != self._policy:
            return
        mark = self._mark()
        if self._steps_since(mark.version) < self._every:
            return
        look = self._look(mark, self._clock.now())
        report = make_report(self._policy, mark, look)
        self._keep(LATEST, report)
        self._keep(MARK, mark_of(look))
        self._db.event({"event": "balance", **msgspec.to_builtins(join_reports([report, *others]))})

    def latest(self) -> Report | None:
        return _read(self._db, LATEST, Report)

    def now(self) -> Balance:
        mark = self._mark()
        look = self._look(mark, self._clock.now())
        return Balance(latest=self.latest(), current=make_report(self._policy, mark, look))

    def _look(self, mark: Mark, now: float) -> Look:
        self._db.write_totals()
        return take_look(self._db, self._policy, mark, now)

    def _mark(self) -> Mark:
        mark = _read(self._db, MARK, Mark)
        assert mark is not None, "opened before"
        return mark

    def _steps_since(self, version: int) -> int:
        query = "SELECT count(*) FROM steps WHERE policy = ? AND version > ? AND state = 'live'"
        return int(self._db.value(query, (self._policy, version)))

    def _keep(self, key: str, value: Mark | Report) -> None:
        self._db.set_meta(key, msgspec.to_builtins(value))


def read_balance(paths: Sequence[Path], policy: str) -> Balance:
    """Return the balance of a run that is not being served, from its ledgers: at the last time that each was used."""
    return joined([_read_one(path, policy) for path in paths])


def _read_one(path: Path, policy: str) -> Balance:
    try:
        with snapshot(path) as reads:
            return _balance_of(reads, path, policy)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the ledger {path} is damaged: {error}", "restore the run folder from a copy") from error


def _balance_of(reads: Reads, path: Path, policy: str) -> Balance:
    mark = _read(reads, MARK, Mark)
    if mark is None:
        raise RunError(f"{path} has no balance yet", "start the run first")
    look = take_look(reads, policy, mark, _last_news(reads, mark))
    return Balance(latest=_read(reads, LATEST, Report), current=make_report(policy, mark, look))


# ---------------------------------------------------------------- reading


def take_look(reads: Reads, policy: str, mark: Mark, now: float) -> Look:
    """The rows that a report of the window since `mark` is made from."""
    newest = reads.all(
        "SELECT version FROM steps WHERE policy = ? AND state = 'live' ORDER BY version DESC LIMIT 2", (policy,)
    )
    steps = reads.all(
        "SELECT version, at, step_seconds, wait_seconds FROM steps "
        "WHERE policy = ? AND version > ? AND state = 'live' ORDER BY version",
        (policy, mark.version),
    )
    rounds = reads.all(
        "SELECT admitted_at, ifnull(ended_at, ?) AS ended_at FROM rounds "
        "WHERE state = 'running' OR (state = 'ended' AND ended_at > ?)",
        (now, mark.time),
    )
    return Look(
        time=now,
        version=newest[0]["version"] if newest else 0,
        settled=newest[1]["version"] if len(newest) > 1 else 0,
        entered=int(reads.value("SELECT value FROM counters WHERE name = ?", (ENTERED,)) or 0),
        steps=[Step(row["version"], row["at"], row["step_seconds"], row["wait_seconds"]) for row in steps],
        rounds=[Span(row["admitted_at"], row["ended_at"]) for row in rounds],
        nodes=[_node(row) for row in reads.all("SELECT * FROM nodes ORDER BY name")],
    )


def _node(row: sqlite3.Row) -> NodeLook:
    return NodeLook(
        name=row["name"],
        seen=row["seen"],
        gone=row["state"] != "healthy",
        gpus=_gpus(json.loads(row["stats"]).get("gpus")),
        version=row["version"],
        counts=Counts(**{name: row[name] for name in Counts.__struct_fields__}),
    )


def _gpus(declared: Any) -> int:
    """Return the GPUs that a node declares; 1 if it declares none or an invalid number."""
    if isinstance(declared, int | float) and math.isfinite(declared) and 0 < declared <= _MOST_GPUS:
        return math.ceil(declared)
    return 1


def _last_news(reads: Reads, mark: Mark) -> float:
    """Return when the service last recorded activity."""
    heard = reads.value("SELECT max(seen) FROM nodes")
    stepped = reads.value("SELECT max(at) FROM steps WHERE version > ?", (mark.version,))
    return max(mark.time, mark.opened, heard or 0.0, stepped or 0.0)


def _read(reads: Reads, key: str, kind: type[Kept]) -> Kept | None:
    text = reads.value("SELECT value FROM meta WHERE key = ?", (key,))
    return None if text is None else json_decoder(kind).decode(text)


# ---------------------------------------------------------------- Prometheus


class BalanceGauges(Collector):
    """Return the numbers of the latest report; none before the first. Unknown numbers are left out."""

    def __init__(self, balances: Balances) -> None:
        self._balances = balances

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._balances.latest()
        if report is None:
            return
        for block in (report.window, report.production, report.decision):
            for name, value in msgspec.to_builtins(block).items():
                if isinstance(value, int | float):
                    yield GaugeMetricFamily(f"rillflow_balance_{name}", _help(name), value=value)
        yield from _node_gauges(report.nodes)


def _node_gauges(nodes: Sequence[NodeReport]) -> Iterator[GaugeMetricFamily]:
    for name in ("gpus", "produced", "accepted", "accept_rate", "throughput_per_gpu"):
        family = GaugeMetricFamily(f"rillflow_balance_node_{name}", _help(name), labels=["node"])
        for node in nodes:
            if (value := getattr(node, name)) is not None:
                family.add_metric([node.id], value)
        yield family
    states = GaugeMetricFamily("rillflow_balance_node_state", _help("state"), labels=["node", "state"])
    for node in nodes:
        states.add_metric([node.id, node.state], 1)
    yield states


def _help(name: str) -> str:
    return f"{name.replace('_', ' ').capitalize()} in the latest balance report"
