"""The share of its time that each worker of a run spent in each state, and the picture of it.

Pipelines differ in their idle gaps (docs/pipelines.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rillflow.errors import RunError
from rillflow.storage.spans import STATES, Span, read_spans

COLOURS = {
    "train": "#d94801",
    "switch": "#6a51a3",
    "load": "#fdae6b",
    "infer": "#238b45",
    "rollout": "#2171b5",
    "idle": "#e8e8e8",
}
_ROW = 0.45  # inches
_LEAST = 2000  # share of the picture below which a span is invisible: neighbours are drawn as one

Workers = Mapping[str, Sequence[Span]]


class Window(NamedTuple):
    """Seconds since the epoch."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def timeline(run: Path) -> dict[str, list[Span]]:
    """The spans of every worker of a run; RunError where nothing was written."""
    workers = {worker: spans for worker, spans in read_spans(run).items() if spans}
    if not workers:
        raise RunError(f"{run} has no timeline", "it is written while a run computes; is this a run's folder?")
    return workers


def whole(workers: Workers) -> Window:
    """Return the window from the first to the last span of any worker."""
    busy = [span for spans in workers.values() for span in spans if span.state != "idle"]
    spans = busy or [span for spans in workers.values() for span in spans]
    return Window(min(span.begin for span in spans), max(span.end for span in spans))


def seconds(spans: Sequence[Span], window: Window) -> dict[str, float]:
    """In each state, within the window. Time of which nothing is known, because the worker was not there, is idle."""
    found = dict.fromkeys(STATES, 0.0)
    for span in spans:
        found[span.state] += max(0.0, min(span.end, window.end) - max(span.begin, window.begin))
    found["idle"] += max(0.0, window.seconds - sum(found.values()))
    return found


def shares(spans: Sequence[Span], window: Window) -> dict[str, float]:
    """As `seconds`, of the whole window."""
    return {state: spent / window.seconds for state, spent in seconds(spans, window).items()} if window.seconds else {}


def idle_share(spans: Sequence[Span], window: Window) -> float:
    return shares(spans, window).get("idle", 0.0)


def report(workers: Workers, window: Window) -> dict[str, dict[str, float]]:
    """The shares of all workers, rounded, for people and their programs."""
    return {
        worker: {state: round(share, 4) for state, share in shares(spans, window).items()}
        for worker, spans in workers.items()
    }


def draw(workers: Workers, path: Path, title: str, window: Window | None = None) -> None:
    """One row for each worker, a colour for each state, as a PNG."""
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    window = window or whole(workers)
    figure = Figure(figsize=(10, 1.4 + _ROW * len(workers)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, spans in enumerate(workers.values()):
        axes.broken_barh([(0, window.seconds)], (row - 0.4, 0.8), facecolors=COLOURS["idle"])
        for state in STATES:
            bars = _bars(spans, state, window) if state != "idle" else []
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[state])
    axes.set(xlim=(0, window.seconds), xlabel="seconds", title=title)
    axes.set_yticks(
        range(len(workers)),
        [f"{worker}\n{idle_share(spans, window):.0%} idle" for worker, spans in workers.items()],
    )
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=COLOURS[state], label=state) for state in STATES],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        ncols=len(STATES),
        frameon=False,
    )
    figure.savefig(path)


def _bars(spans: Sequence[Span], state: str, window: Window) -> list[tuple[float, float]]:
    """Yield begin and width of each bar; bars that visibly touch are joined."""
    bars: list[tuple[float, float]] = []
    unseen = window.seconds / _LEAST
    for span in spans:
        begin, end = max(span.begin, window.begin) - window.begin, min(span.end, window.end) - window.begin
        if span.state != state or end <= begin:
            continue
        if bars and begin - sum(bars[-1]) < unseen:
            bars[-1] = (bars[-1][0], end - bars[-1][0])
        else:
            bars.append((begin, end - begin))
    return bars
