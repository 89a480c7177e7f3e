"""The timeline: a lane for each worker, and the share of its time that it was idle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rillflow.dashboard.lanes import IDLE, Spans
from rillflow.dashboard.watched import WatchedRun
from rillflow.storage.spans import STATES

_MOST_LANES = 256

Bar = tuple[str, float, float]


def timeline(run: WatchedRun, width: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return the timeline. `low` and `high` are seconds since the first span of any worker; bars have the same
    origin."""
    workers = run.lanes.follow()
    if not workers:
        return {"begin": 0.0, "seconds": 0.0, "low": 0.0, "high": 0.0, "states": STATES, "lanes": [], "left_out": 0}
    begin, end = whole(workers.values())
    if low is None or high is None or high <= low:
        low, high = 0.0, end - begin
    shown = dict(sorted(workers.items())[:_MOST_LANES])
    return {
        "begin": begin,
        "seconds": end - begin,
        "low": low,
        "high": high,
        "states": STATES,
        "lanes": [
            {
                "worker": worker,
                "shares": shares(spans, begin + low, begin + high),
                "bars": bars(spans, begin, begin + low, begin + high, width),
            }
            for worker, spans in shown.items()
        ],
        "left_out": len(workers) - len(shown),
    }


def whole(workers: Iterable[Spans]) -> tuple[float, float]:
    """Return the time from the first to the last activity of any worker; of idle workers, their idle time."""
    lanes = list(workers)
    busy = [(spans.begin[own], spans.end[own]) for spans in lanes if (own := spans.state != IDLE).any()]
    every = busy or [(spans.begin, spans.end) for spans in lanes]
    return float(min(begin[0] for begin, _ in every)), float(max(end[-1] for _, end in every))


def shares(spans: Spans, low: float, high: float) -> dict[str, float]:
    """Return the share of each state in the window. Time without a span counts as idle: the worker did not run."""
    if high <= low:
        return {}
    found = dict(zip(STATES, (spans.seconds(np.array([low, high]))[:, 0] / (high - low)).tolist(), strict=True))
    found["idle"] += max(0.0, 1.0 - sum(found.values()))
    return found


def bars(spans: Spans, origin: float, low: float, high: float, width: int) -> list[Bar]:
    """Return the spans of the window, cut to it. With more spans than pixels, each pixel shows the state that fills
    most of it, and neighbours of one state are one bar."""
    part = spans.within(low, high)
    if len(part) > width:
        edges = np.linspace(low, high, width + 1)
        filled = spans.seconds(edges)
        known = filled.sum(axis=0) > 0
        part = Spans(edges[:-1][known], edges[1:][known], filled.argmax(axis=0)[known].astype(np.int8)).joined()
    begins, ends = (part.begin - origin).tolist(), (part.end - origin).tolist()
    return [(STATES[code], begin, end) for code, begin, end in zip(part.state.tolist(), begins, ends, strict=True)]
