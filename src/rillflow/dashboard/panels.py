"""The panels by their names in URLs: what each is asked with, the view that answers, and what that is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from rillflow.dashboard import charts, flow, nodes, records, trajectories
from rillflow.dashboard.charts import Axis, Window
from rillflow.dashboard.watched import LivePart, Source

Pixels = Annotated[int, Meta(ge=50, le=4000)]


class Panel(NamedTuple):
    """`sources` are the parts of the run folder that the view reads; the recipe, which does not change, is not among
    them. `live` are the parts of the service's answers that it shows; a panel without them is not given any."""

    query: type[msgspec.Struct]
    view: Callable[..., Any]
    sources: tuple[Source, ...]
    live: tuple[LivePart, ...] = ()


class Nothing(msgspec.Struct):
    """A panel that is asked without options."""


class Curves(msgspec.Struct):
    width: Pixels = 600
    axis: Axis = "step"
    low: float | None = None
    high: float | None = None

    @property
    def window(self) -> Window:
        return Window(self.width, self.axis, self.low, self.high)


class SomeCurves(Curves):
    names: Annotated[str, Meta(max_length=20_000)] = ""


class Other(Curves, kw_only=True):
    """`other` is the name of the run to compare with."""

    other: str


class Lanes(msgspec.Struct):
    width: Pixels = 1000
    low: float | None = None
    high: float | None = None


class Episode(msgspec.Struct):
    id: Annotated[str, Meta(max_length=200)]


class Tokens(Episode):
    sample: int = 0
    offset: Annotated[int, Meta(ge=0)] = 0


class LogLines(msgspec.Struct):
    name: str
    level: str = "DEBUG"
    find: Annotated[str, Meta(max_length=200)] = ""


PANELS: dict[str, Panel] = {
    "overview": Panel(
        Curves, lambda run, live, query: charts.overview(run, live, query.window), ("state", "metrics"), ("status",)
    ),
    "metrics": Panel(
        SomeCurves, lambda run, live, query: charts.metrics(run, query.names.split(","), query.window), ("metrics",)
    ),
    "timeline": Panel(
        Lanes, lambda run, live, query: records.timeline(run, query.width, query.low, query.high), ("timeline",)
    ),
    "flow": Panel(Nothing, lambda run, live, query: flow.flow(run), ("ledger",)),
    "nodes": Panel(Nothing, lambda run, live, query: nodes.nodes(run, live), ("ledger",), ("status", "nodes")),
    "trajectories": Panel(
        trajectories.Wanted, lambda run, live, query: trajectories.table(run, query), ("trajectories", "metrics")
    ),
    "trajectory": Panel(Episode, lambda run, live, query: trajectories.episode(run, query.id), ("trajectories",)),
    "tokens": Panel(
        Tokens,
        lambda run, live, query: trajectories.tokens(run, query.id, query.sample, query.offset),
        ("trajectories",),
    ),
    "weights": Panel(
        Nothing, lambda run, live, query: nodes.weights(run, live), ("weights", "ledger"), ("status", "nodes")
    ),
    "balance": Panel(
        Nothing, lambda run, live, query: nodes.balance(run, live), ("metrics", "ledger", "maintainer"), ("balance",)
    ),
    "algorithms": Panel(Curves, lambda run, live, query: flow.algorithms(run, query.window), ("metrics", "ledger")),
    "compare": Panel(
        Other, lambda run, live, query, other: charts.compare(run, other, query.window), ("state", "metrics")
    ),
    "logs": Panel(Nothing, lambda run, live, query: records.log_files(run), ("logs", "ledger")),
    "log": Panel(
        LogLines, lambda run, live, query: records.log_lines(run, query.name, query.level, query.find), ("logs",)
    ),
}
