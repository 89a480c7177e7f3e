"""Who did what when: a lane for each worker, and the share of its time that it was idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow.dashboard.watched import WatchedRun
from rillflow.observe.timeline import COLOURS, Window, shares, whole
from rillflow.storage.spans import STATES, Span

_MOST_LANES = 256


def timeline(run: WatchedRun, width: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """`low` and `high` are seconds since the run's first moment; bars have the same origin."""
    workers = run.lanes.follow()
    if not workers:
        return {"begin": 0.0, "seconds": 0.0, "states": STATES, "colours": COLOURS, "lanes": [], "left_out": 0}
    all_of_it = whole(workers)
    window = all_of_it
    if low is not None and high is not None and high > low:
        window = Window(all_of_it.begin + low, all_of_it.begin + high)
    shown = dict(sorted(workers.items())[:_MOST_LANES])
    lanes = [
        {
            "worker": worker,
            "shares": shares(spans, window),
            "bars": [
                (span.state, span.begin - all_of_it.begin, span.end - all_of_it.begin)
                for span in visible(spans, window, width)
            ],
        }
        for worker, spans in shown.items()
    ]
    return {
        "begin": all_of_it.begin,
        "seconds": all_of_it.seconds,
        "low": window.begin - all_of_it.begin,
        "high": window.end - all_of_it.begin,
        "states": STATES,
        "colours": COLOURS,
        "lanes": lanes,
        "left_out": len(workers) - len(shown),
    }


def visible(spans: Sequence[Span], window: Window, width: int) -> list[Span]:
    """The spans of the window, cut to it. Where there are more than pixels, each pixel has the state that fills most
    of it, and pixels of one state are one span."""
    cut = [
        Span(span.state, max(span.begin, window.begin), min(span.end, window.end))
        for span in spans
        if span.end > window.begin and span.begin < window.end
    ]
    if len(cut) <= width:
        return cut
    pixel = window.seconds / width
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for span in cut:
        at = min(int((span.begin - window.begin) / pixel), width - 1)
        until = min(int((span.end - window.begin) / pixel), width - 1)
        for index in range(at, until + 1):
            begin = window.begin + index * pixel
            part = min(span.end, begin + pixel) - max(span.begin, begin)
            filled[index][span.state] = filled[index].get(span.state, 0.0) + part
    bars: list[Span] = []
    for index, states in enumerate(filled):
        if not states:
            continue
        state, begin = max(states, key=states.__getitem__), window.begin + index * pixel
        if bars and bars[-1].state == state and begin - bars[-1].end < pixel / 2:
            bars[-1] = Span(state, bars[-1].begin, begin + pixel)
        else:
            bars.append(Span(state, begin, begin + pixel))
    return bars
