"""The timeline of a run: the share of its time that each worker spent in each state, and the run as a trace.

Pipelines differ in their idle gaps (docs/pipelines.md).

A trace is for Perfetto or chrome://tracing: Chrome's trace event format, as JSON. It has a process for the workers,
with a track for each; one for the episodes of each node, on as many tracks as were played at once; one for each policy
with its batches and optimizer steps; one for evaluations. A flow leads from an episode's lease over its batch to the
step that trained it. Bounded: of a long run the newest episodes, steps and spans are shown.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rillflow.dataflow.episode_history import Episode, History, Step
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


MOST = 20_000  # episodes, steps, and spans of a worker
_LEAST_SHOWN = 1  # microseconds of a slice: viewers drop empty ones

Event = dict[str, Any]


class Part(NamedTuple):
    """Something with a begin and an end, in seconds since the epoch."""

    name: str
    category: str
    begin: float
    end: float
    about: Mapping[str, Any] = {}


class Tracks:
    """Numbers of processes and threads, which the format wants, by name; and the events that name them."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}

    def of(self, process: str, thread: str) -> dict[str, int]:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        return {"pid": pid, "tid": self._threads.setdefault((pid, thread), len(self._threads) + 1)}

    def named(self) -> Iterator[Event]:
        for name, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        for (pid, name), tid in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


class TraceBuilder:
    """Builds the events of one run. Events that are still open end at `now`."""

    def __init__(self, begin: float, now: float) -> None:
        self._begin = begin
        self._now = max(begin, now)
        self._tracks = Tracks()
        self._events: list[Event] = []

    def workers(self, workers: Mapping[str, Sequence[Span]]) -> None:
        for worker, spans in workers.items():
            track = self._tracks.of("workers", worker)
            for span in spans[-MOST:]:
                if span.state != "idle":
                    self._slice(track, Part(span.state, "worker", span.begin, span.end))

    def history(self, history: History) -> None:
        """Episodes, batches and steps, and the flows between them."""
        served = self._steps(history.steps)
        self._episodes(history, served)
        lanes = Lanes()
        for found in history.evaluations:
            about = {"version": found.version, "reward": found.reward, "state": found.state}
            part = Part(f"version {found.version}", "evaluation", found.begin, self._ended(found.end), about)
            self._slice(self._tracks.of("evaluation", f"rounds {lanes.take(part.begin, part.end)}"), part)

    def events(self) -> list[Event]:
        """Return all events in the order of time, the names of tracks first."""
        return [*self._tracks.named(), *sorted(self._events, key=lambda event: event["ts"])]

    # ------------------------------------------------------------ parts

    def _steps(self, steps: Sequence[Step]) -> dict[str, tuple[Event, Event | None]]:
        """The slices of batches by their ids, each with that of its step if there is one."""
        found: dict[str, tuple[Event, Event | None]] = {}
        free: dict[str, float] = {}  # when the last step of a policy ended
        lanes: dict[str, Lanes] = defaultdict(Lanes)
        for step in steps:
            process, end = f"policy {step.policy}", self._ended(step.end)
            track = self._tracks.of(process, f"batches {lanes[step.policy].take(step.begin, end)}")
            about = {"groups": step.groups, "samples": step.samples, "state": step.state}
            batch = self._slice(track, Part(step.batch, "batch", step.begin, end, about))
            trained = None
            if step.at is not None and step.seconds is not None:
                begin = max(step.at - step.seconds, free.get(step.policy, 0.0))
                free[step.policy] = max(begin, step.at)
                about = {"version": step.version, "reward": step.reward, "waited": step.waited, "line": step.line}
                part = Part(f"step to version {step.version}", "step", begin, step.at, about)
                trained = self._slice(self._tracks.of(process, "steps"), part)
            found[step.batch] = batch, trained
        return found

    def _episodes(self, history: History, served: Mapping[str, tuple[Event, Event | None]]) -> None:
        lanes: dict[str, Lanes] = defaultdict(Lanes)
        for episode in history.episodes:
            end = self._ended(episode.end)
            lane = lanes[episode.node].take(episode.begin, end)
            track = self._tracks.of(f"episodes on {episode.node}", f"lane {lane:03d}")
            made = self._slice(track, Part(episode.id, episode.lane, episode.begin, end, _about(episode)))
            batches = history.batches_of.get(episode.group, ()) if episode.counts else ()
            for batch in batches:
                if batch in served:
                    self._flow(f"{episode.id}:{batch}", made, *served[batch])

    def _flow(self, name: str, episode: Event, batch: Event, step: Event | None) -> None:
        """An arrow from slice to slice. Each of its ends lies within its slice, or a viewer would not bind it."""
        about = {"name": "sample", "cat": "flow", "id": name}
        self._events.append({"ph": "s", **about, **_at(episode, episode["ts"])})
        last = batch if step is None else step
        if step is not None:
            self._events.append({"ph": "t", **about, **_at(batch, batch["ts"])})
        self._events.append({"ph": "f", "bp": "e", **about, **_at(last, last["ts"] + last["dur"] - 1)})

    def _slice(self, track: dict[str, int], part: Part) -> Event:
        ts = self._micros(part.begin)
        times = {"ts": ts, "dur": max(_LEAST_SHOWN, self._micros(part.end) - ts)}
        known = {key: value for key, value in part.about.items() if value is not None}
        made = {"ph": "X", "name": part.name, "cat": part.category, **times, **track, "args": known}
        self._events.append(made)
        return made

    def _micros(self, time: float) -> int:
        return max(0, round((time - self._begin) * 1e6))

    def _ended(self, end: float | None) -> float:
        return self._now if end is None else end


class Lanes:
    """Gives things that overlap different numbers, as few as possible. They come in the order of their begins."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []  # a heap: until when, and which
        self._free: list[int] = []

    def take(self, begin: float, end: float) -> int:
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        lane = heapq.heappop(self._free) if self._free else len(self._busy)
        heapq.heappush(self._busy, (end + 2e-6 * _LEAST_SHOWN, lane))  # times are rounded in a trace
        return lane


def trace(workers: Mapping[str, Sequence[Span]], history: History, now: float) -> dict[str, Any]:
    """Return the trace of a run as one JSON object; a run of which nothing is known yet has no events."""
    begins = [spans[0].begin for spans in workers.values() if spans]
    for first in (history.episodes[:1], history.steps[:1], history.evaluations[:1]):
        begins += [found.begin for found in first]
    builder = TraceBuilder(min(begins, default=now), now)
    builder.workers(workers)
    builder.history(history)
    shown = {"episodes": len(history.episodes), "episodes_in_all": history.episodes_in_all}
    about = {"begin": min(begins, default=now), **shown}
    return {"traceEvents": builder.events(), "displayTimeUnit": "ms", "otherData": about}


def _at(slice_: Event, ts: int) -> dict[str, int]:
    return {"ts": ts, "pid": slice_["pid"], "tid": slice_["tid"]}


def _about(episode: Episode) -> dict[str, Any]:
    names = ("attempt", "state", "cause", "group", "prompt", "reward", "samples", "calls")
    return {name: getattr(episode, name) for name in names if getattr(episode, name) != ""}
