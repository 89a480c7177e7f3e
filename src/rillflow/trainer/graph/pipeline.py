"""One step: the nodes of a chain as a pipeline of generators, pulled by the train nodes.

Invariants: one node is active at a time; parts flow as they come, and only a node that needs the whole batch waits for
all of it; what a node makes is what its function declares, of the right length, and numbers only; what `check` or the
source raises before the first train node has returned leaves every weight as it was. Once one model has been updated
the step is finished and nothing asks `check` any more: a batch lost meanwhile shows when it is committed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.contracts import Clock
from rillflow.errors import GraphError
from rillflow.trainer.graph.databuffer import Databuffer, joined
from rillflow.trainer.graph.nodes import Node
from rillflow.trainer.graph.planner import Chain
from rillflow.trainer.graph.step import Step
from rillflow.trainer.parallel.redistribute import Redistribution

if TYPE_CHECKING:
    from rillflow.trainer.graph.databuffer import Column


class Times:
    """Seconds that each node was active. While a node waits for what an earlier one yields, that one is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._active: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, node: Node) -> Iterator[None]:
        """An error that leaves it says in which node it came up."""
        self._charge()
        self._active.append(node.id)
        try:
            yield
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"in node {node.id} of the step graph")
            raise
        finally:
            self._charge()
            self._active.pop()

    def _charge(self) -> None:
        now = self._clock.monotonic()
        if self._active:
            self._seconds[self._active[-1]] += now - self._since
        self._since = now

    def metrics(self) -> dict[str, float]:
        return {f"node_{re.sub(r'[^A-Za-z0-9]', '_', name)}_seconds": value for name, value in self._seconds.items()}


class Pipeline:
    """Runs a chain once, for one step."""

    def __init__(self, chain: Chain, step: Step, clock: Clock) -> None:
        self._nodes = chain.nodes
        self._step = step
        self._times = Times(clock)

    def run(self) -> dict[str, float]:
        """The metrics of all nodes."""
        stream: Iterable[Databuffer] = ()
        held = everybody = self._step.peers.size
        for node, after in zip(self._nodes, (*self._nodes[1:], None), strict=True):
            wanted = node.ranks or everybody
            if node.is_source:
                stream = self._sourced(node)
            elif node.kind == "publish":
                self._call(node)
            else:
                if wanted != held:
                    stream, held = self._moved(stream, held, wanted), wanted
                if node.on_columns:
                    stream = self._made(node, stream)
                else:
                    again = after is not None and after.kind != "publish"
                    stream = _Kept(stream) if again else stream
                    self._train(node, stream)
        return self._step.metrics | self._times.metrics()

    # ------------------------------------------------------------ nodes

    def _call(self, node: Node, *given: object) -> Any:
        with self._times.of(node):
            return node.function.run(self._step, *given, **node.options)

    def _sourced(self, node: Node) -> Iterator[Databuffer]:
        parts = iter(self._call(node))
        empty = True
        while True:
            with self._times.of(node):
                part = next(parts, None)
            if part is None:
                break
            empty = False
            yield part
        if empty:
            raise GraphError(f"node {node.id} gave no data", "a source yields at least one part of the batch")

    def _made(self, node: Node, stream: Iterable[Databuffer]) -> Iterator[Databuffer]:
        if node.function.scope == "batch":
            stream = self._whole(node, stream)
        for data in stream:
            columns = self._call(node, data)
            with self._times.of(node):
                more = _added(node, data, columns)
            yield more

    def _whole(self, node: Node, stream: Iterable[Databuffer]) -> Iterator[Databuffer]:
        with self._times.of(node):
            whole = joined(list(stream))
        yield whole

    def _moved(self, stream: Iterable[Databuffer], held: int, wanted: int) -> Iterator[Databuffer]:
        """The whole batch, from the `held` ranks that have it to the `wanted`. Collective."""
        yield Redistribution(self._step.peers).move(joined(list(stream)), held, wanted)

    def _train(self, node: Node, stream: Iterable[Databuffer]) -> None:
        self._step.metrics |= self._call(node, iter(stream)) or {}
        self._step.check = _finished


class _Kept:
    """A stream that several can read one after the other, each from its beginning."""

    def __init__(self, stream: Iterable[Databuffer]) -> None:
        self._stream = iter(stream)
        self._parts: list[Databuffer] = []

    def __iter__(self) -> Iterator[Databuffer]:
        yield from self._parts
        for part in self._stream:
            self._parts.append(part)
            yield part


def _finished() -> None:
    """Nothing ends the step any more."""


# ---------------------------------------------------------------- what a node has made


def _added(node: Node, data: Databuffer, columns: Mapping[str, Column]) -> Databuffer:
    """The data with what the node was to make. A column that is made anew keeps its type."""
    if not isinstance(columns, Mapping) or set(columns) != set(node.gives):
        made = ", ".join(columns) if isinstance(columns, Mapping) else type(columns).__name__
        raise GraphError(
            f"node {node.id} returned {made or 'nothing'}, its function declares {', '.join(node.gives)}",
            f"return a dict with exactly what `gives` of {node.function.name} names",
        )
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        _check_numbers(node, name, array)
    typed = {name: array.astype(data[name].dtype) if name in data else array for name, array in arrays.items()}
    try:
        more = data.adding(typed)
    except GraphError as error:
        raise GraphError(f"node {node.id}: {error.message}", error.hint) from None
    if "mask_N" in arrays and more.rows.mask_N[more.rows.start_R].any():
        raise GraphError(
            f"node {node.id} trains the first token of {int(more.rows.mask_N[more.rows.start_R].sum())} rows",
            "nothing comes before it: keep mask_N 0 there, as it was",
        )
    return more


def _check_numbers(node: Node, name: str, array: Column) -> None:
    if array.dtype.kind not in "biuf":
        raise GraphError(
            f"node {node.id} made {name} of {array.dtype}", f"let {node.function.name} return numbers or flags"
        )
    # Where no answer ends there is no reward of one: NaN says so.
    bad = np.isinf(array) if name == "step_reward_N" else ~np.isfinite(array)
    if bad.any():
        raise GraphError(
            f"node {node.id} made {name} with {int(bad.sum())} values that are not finite",
            f"look at what {node.function.name} divides by, and at its inputs",
        )
