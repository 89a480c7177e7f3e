"""When the host does what while deltas are made or applied on a GPU: functions are wrapped for the time of a call."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from rillflow.weights.delta.gpu import (
    batch,
    decode,
    encode,
    found,
    heads,
    incoming,
    launch,
    plans,
    room,
    sealing,
    tables,
    threads,
    written,
)

REPEATS = 9
# What is looked at, and what it is called.
PLACES: tuple[tuple[object, str, str], ...] = (
    (encode._Job, "__init__", "job"),
    (encode, "_choose", "launch sample, choose"),
    (encode, "_estimates", "wait for estimates"),
    (batch.Rows, "__init__", "rows"),
    (written.Batch, "__init__", "batch"),
    (written.Batch, "compare", "launch compare"),
    (written.Batch, "plan", "launch plan"),
    (written.Batch, "write", "launch write"),
    (room.Room, "make", "memory"),
    (launch.Kernel, "__call__", "launches"),
    (batch.Landing, "__init__", "landing"),
    (batch.Landing, "wait", "wait"),
    (tables, "write", "tables"),
    (encode._Job, "add", "bytes"),
    (sealing, "_checksums", "hashes"),
    (heads, "addresses", "addresses"),
    (heads.Deltas, "segments", "segments"),
    (decode._Job, "__init__", "job"),
    (found.Counted, "__init__", "launch sizes"),
    (decode._Job, "batches", "batches"),
    (incoming.Incoming, "__init__", "incoming"),
    (incoming, "divided", "copies begin"),
    (incoming.Incoming, "wait", "wait for copies"),
    (incoming.Incoming, "check", "hashes begin"),
    (found.Counted, "read", "launch tables"),
    (incoming.Incoming, "arrived", "arrived"),
    (threads.Later, "wait", "wait for threads"),
    (plans.Plans, "__init__", "plans"),
    (encode, "_finish", "finish"),
    (found.Found, "__init__", "launch ranks"),
    (found.Found, "records", "launch records"),
    (heads.Checksums, "wait", "wait for checksums"),
    (decode._Job, "verify", "verify"),
    (decode, "scatter", "launch scatter"),
)


class Mark(NamedTuple):
    """A call: what it is called, behind a `|` if it was in another thread; when it began; how long it took, and calls
    within it."""

    name: str
    start: float
    taken: float
    inner: float


@contextmanager
def marked(seen: list[Mark]) -> Iterator[None]:
    """Note each call of the functions above: its time, and that of others of them within it, in the same thread."""
    here, stacks = threading.get_ident(), defaultdict[int, list[float]](lambda: [0.0])

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            thread, start = threading.get_ident(), time.perf_counter()
            within = stacks[thread]
            within.append(0.0)
            try:
                return call(*arguments, **named)
            finally:
                taken = time.perf_counter() - start
                seen.append(Mark(name if thread == here else f"| {name}", start, taken, within.pop()))
                within[-1] += taken

        return timed

    with ExitStack() as stack:
        for owner, attribute, name in PLACES:
            stack.enter_context(mock.patch.object(owner, attribute, wrapped(name, getattr(owner, attribute))))
        yield


def timeline(step: Callable[[], object], before: Callable[[], object]) -> list[str]:
    """Lines of text: each function's own milliseconds, the median of some calls, and what one call did when."""
    sums: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        seen: list[Mark] = []
        before()
        torch.cuda.synchronize()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with marked(seen):
            begin = time.perf_counter()
            step()
            end = time.perf_counter()
            torch.cuda.synchronize()
        own: dict[str, float] = defaultdict(float)
        for mark in seen:
            own[mark.name] += 1000 * (mark.taken - mark.inner)
        own["all"] = 1000 * (end - begin)
        own["not marked"] = own["all"] - sum(own[name] for name in own if name != "all" and name[0] != "|")
        own["page faults, in 1000"] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / 1000
        for name, value in own.items():
            sums[name].append(value)
    lines = [f"{name:24} {statistics.median(values):9.3f}" for name, values in sums.items()]
    last = sorted(seen, key=lambda mark: mark.start)
    return lines + [f"{1000 * (mark.start - begin):9.3f} + {1000 * mark.taken:7.3f}  {mark.name}" for mark in last]
