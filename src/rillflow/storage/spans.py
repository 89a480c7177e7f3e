"""A worker's states over time, as JSON lines in RUN/timeline/WORKER.jsonl.

Invariants: at every moment a worker is in exactly one state, the strongest of what it does, or idle; the lines of a
file do not overlap and come in order. A kill loses at most the last `FLUSH` seconds. Neither the buffer nor the file
grows beyond its bound: a full file becomes WORKER.jsonl.1, in place of the one before it. If the disk cannot take the
lines, the worker goes on: they are dropped, which is said once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import StorageError
from rillflow.storage.files import disk_errors

log = logging.getLogger(__name__)

Doing = Literal["train", "switch", "load", "infer", "rollout"]
STATES: tuple[str, ...] = (*get_args(Doing), "idle")  # the strongest first
FOLDER = "timeline"
FLUSH = 1.0
BOUND = 8 << 20  # bytes of one file; there are two at most
_BUFFER = 4096  # spans that wait for the next flush
_NAME = re.compile(r"(?P<worker>[A-Za-z0-9][A-Za-z0-9._-]*)\.jsonl(\.1)?")


class Span(msgspec.Struct, frozen=True, array_like=True):
    """From `begin` to `end`, in seconds since the epoch, a worker was in `state`."""

    state: str
    begin: float
    end: float


_SPAN = msgspec.json.Decoder(Span)
_SPANS = msgspec.json.Decoder(list[Span])


class Spans(Protocol):
    """The interface for a worker's states: an activity begins, and ends."""

    def begin(self, doing: Doing) -> None: ...

    def end(self, doing: Doing) -> None: ...

    def doing(self, what: Doing) -> AbstractContextManager[None]: ...


class SpanLog:
    """Writes the states of one worker. Safe to use from several threads; `begin` and `end` take microseconds.

    Concurrent activities are distinguished by name: a worker whose engine samples while weights are loaded is at
    `load`.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None, bound: int = BOUND, flush: float = FLUSH) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._bound = bound
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._doing: Counter[str] = Counter()
        self._state = "idle"
        self._since = self._clock.now()
        self._buffer: list[Span] = []
        self._complained = False
        self._closed = threading.Event()
        # A thread, because neither a trainer that computes nor an event loop that is busy would keep the time.
        self._flusher = threading.Thread(target=self._keep_flushing, args=(flush,), name="spans", daemon=True)
        self._flusher.start()

    def begin(self, doing: Doing) -> None:
        with self._lock:
            self._doing[doing] += 1
            self._settle()

    def end(self, doing: Doing) -> None:
        with self._lock:
            assert self._doing[doing] > 0, f"{doing} was not begun"
            self._doing[doing] -= 1
            self._settle()

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def _settle(self) -> None:
        state = next((each for each in STATES if self._doing[each]), "idle")
        if state != self._state:
            self._cut()
            self._state = state

    def _cut(self) -> None:
        """Close the span that is open, at this moment; time that went back makes it empty, never negative."""
        now = self._clock.now()
        if now > self._since and len(self._buffer) < _BUFFER:
            self._buffer.append(Span(self._state, self._since, now))
        self._since = max(now, self._since)

    def _keep_flushing(self, every: float) -> None:
        while not self._closed.wait(every):
            self.flush()

    def flush(self) -> None:
        """Write what there is; a state that lasts is written in parts, which readers join."""
        with self._writing:
            with self._lock:
                self._cut()
                spans, self._buffer = self._buffer, []
            try:
                self._write(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
            except StorageError as error:
                if not self._complained:
                    log.warning("the timeline has gaps: %s", error)
                self._complained = True

    def _write(self, data: bytes) -> None:
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                if self._path.stat().st_size + len(data) > self._bound:
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            with open(self._path, "ab") as file:
                file.write(data)

    def close(self) -> None:
        """Write the last lines. Later states are not written."""
        self._closed.set()
        if self._flusher is not threading.current_thread():
            self._flusher.join(FLUSH)
        self.flush()


class NoSpans:
    """Records nothing."""

    def begin(self, doing: Doing) -> None: ...

    def end(self, doing: Doing) -> None: ...

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        yield


def open_spans(run: Path, worker: str) -> SpanLog:
    """Return the path of a worker's file in this run folder."""
    return SpanLog(run / FOLDER / f"{worker}.jsonl")


def read_spans(run: Path) -> dict[str, list[Span]]:
    """Return the spans of every worker of a run, in order, equal neighbours joined. Torn and foreign lines are
    ignored."""
    found: dict[str, list[Span]] = {}
    folder = run / FOLDER
    for path in sorted(folder.iterdir() if folder.is_dir() else (), key=lambda path: path.name):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match["worker"], []).extend(_lines(path))
    return {worker: _joined(spans) for worker, spans in sorted(found.items())}


class SpanFollower:
    """Follows the files of a run: each call of `new` returns the spans that have ended since the last one.

    A worker's last span may go on; it comes with what follows it, or when the `rest` is asked for. What was written in
    the moment in which a file became full may be missed. The first call reads the last `most` bytes of each file.
    """

    def __init__(self, run: Path, most: int = BOUND) -> None:
        self._folder = run / FOLDER
        self._most = most
        self._at: dict[str, int] = {}
        self._open: dict[str, list[Span]] = {}

    def new(self, *, rest: bool = False) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = {}
        for path in sorted(self._folder.glob("*.jsonl") if self._folder.is_dir() else ()):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            worker = match["worker"]
            spans = _joined([*self._open.pop(worker, []), *decode_spans(self._tail(path))])
            if not rest:
                self._open[worker], spans = spans[-1:], spans[:-1]
            if spans:
                found[worker] = spans
        return found

    def _tail(self, path: Path) -> list[bytes]:
        """Return the whole lines that are new in a file; of a new file, all."""
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            at = self._at.get(path.name, max(size - self._most, 0))
            file.seek(at if at <= size else 0)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._at[path.name] = file.tell() - len(data) + end
        return data[:end].splitlines()


def _lines(path: Path) -> list[Span]:
    return decode_spans(path.read_bytes().splitlines())


def decode_spans(lines: Sequence[bytes]) -> list[Span]:
    """The spans in these lines; torn and foreign ones are passed over."""
    try:  # all at once, which is many times faster
        spans = _SPANS.decode(b"[" + b",".join(lines) + b"]")
    except msgspec.MsgspecError:
        spans = []
        for line in lines:
            with suppress(msgspec.MsgspecError):
                spans.append(_SPAN.decode(line))
    return [span for span in spans if span.state in STATES and span.begin <= span.end]


def _joined(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        last = joined[-1] if joined else None
        if last is not None and last.state == span.state and last.end == span.begin:
            joined[-1] = Span(last.state, last.begin, span.end)
        else:
            joined.append(span)
    return joined
