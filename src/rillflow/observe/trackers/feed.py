"""What a tracker is, the points that it is given, and the followers that send them.

A follower is a thread that follows what a run writes and sends it elsewhere, without the run noticing. The run folder
is the queue: a slow or absent receiver falls behind in it, and memory holds one batch at most. An error is reported
once, then sending is retried with growing pauses.

The feed of a tracker sends one point for each line of `metrics.jsonl` that has numbers. The number of the last line
that was sent is kept in RUN/trackers/NAME.json, so a resumed run goes on after it. `JsonLines` is the simplest tracker:
one file with the names that all trackers use.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from rillflow.observe.metrics import MetricsReader
from rillflow.storage import write_atomic

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks
PATIENCE = 60.0  # at most, between two attempts at a receiver that fails

Outcome = Literal["finished", "failed", "stopped"]
Kept = TypeVar("Kept", bound=msgspec.Struct)


class Note(Generic[Kept]):
    """What a follower has sent, in a file of the run folder, so that a resumed run goes on after it. A note that is
    missing or damaged is as `nothing`: everything is sent again."""

    def __init__(self, path: Path, nothing: Kept) -> None:
        self._path = path
        try:
            self.kept = msgspec.json.decode(path.read_bytes(), type=type(nothing))
        except (OSError, msgspec.MsgspecError):
            self.kept = nothing

    def keep(self, **changes: object) -> None:
        self.kept = msgspec.structs.replace(self.kept, **changes)
        self._path.parent.mkdir(exist_ok=True)
        write_atomic(self._path, msgspec.json.encode(self.kept))


class Follower(ABC):
    """`tell` gets messages for the user: that sending fails (once), and at the end what was not sent. Without `tell`
    they are kept in `news`."""

    def __init__(self, name: str, *, tell: Callable[[str], None] | None = None, poll: float = POLL) -> None:
        self.name = name
        self.news: list[str] = []
        self._say = tell or self.news.append
        self._poll = poll
        self._failed = False
        self._outcome: Outcome = "stopped"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)

    @abstractmethod
    def advance(self) -> bool:
        """Send the next batch; whether there was one. It may raise, and is called again later then."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Say goodbye to the receiver; called once, after the rest was sent. It may raise."""

    @abstractmethod
    def unsent(self) -> str:
        """Return what has not been sent, in words; empty if that is nothing."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, outcome: Outcome) -> None:
        """Ask it to send the rest and to close; returns at once."""
        self._outcome = outcome
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait until it has closed. A receiver that takes longer is abandoned, and the rest is reported."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"tracker {self.name} did not finish within {seconds:.0f} s")
        if left := self.unsent():
            self._say(f"tracker {self.name}: {left} could not be sent; `rillflow resume` sends the rest")

    # ------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        pause = self._poll
        while not self._stop.wait(pause):
            pause = self._poll if self._attempt() else min(2 * pause, PATIENCE)
        if self._attempt():
            try:
                self.close(self._outcome)
            except (Exception, SystemExit) as error:
                self._tell(error)

    def _attempt(self) -> bool:
        """Send all that is new; whether that went well. No error of a receiver goes further than this."""
        try:
            while self.advance():
                pass
        except (Exception, SystemExit) as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: BaseException) -> None:
        log.warning("tracker %s failed", self.name, exc_info=error)
        if not self._failed:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"tracker {self.name} fails, and is tried again while the run goes on: {text}")
        self._failed = True


# ---------------------------------------------------------------- points

_NOT_MEASURED = frozenset({"step", "version", "time", "seq"})


@dataclass(frozen=True)
class Point:
    """Numbers of one moment. `prefix` stands before each name: `""`, `"POLICY/"` or `"heldout/"`.

    `axis` names what `step` counts: optimizer steps of a policy, or versions for the held-out rewards.
    """

    prefix: str
    axis: Literal["step", "version"]
    step: int
    time: float
    values: dict[str, float]

    @property
    def named(self) -> dict[str, float]:
        return {self.prefix + name: value for name, value in self.values.items()}


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker tells of: its name, a key that no other run has, its folder, and its recipe without
    secrets."""

    name: str
    key: str
    folder: Path
    recipe: Mapping[str, Any]
    ids: Mapping[str, str] = field(default_factory=dict)  # what this tracker noted when it was first opened


class Tracker(Protocol):
    """Takes points. Each method may block and may raise; it is called again later with the same points then."""

    @property
    def ids(self) -> dict[str, str]:
        """Names of the run there, kept in the run folder so that a resumed run goes on in it."""
        ...

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self, outcome: Outcome) -> None: ...


def point_of(line: Mapping[str, Any], *, several: bool) -> Point | None:
    """Return the numbers of a line of `metrics.jsonl`, or None if a tracker has no use for it.

    The names of `several` policies are kept apart by the policy's name; a supervised run has none. A rollback is a
    point at the step that the policy went back to.
    """
    match line.get("event"):
        case None:
            return Point(_prefix(line, several), "step", int(line["step"]), line["time"], _numbers(line))
        case "rollback":
            values = {"rollback/version": float(line["version"]), "rollback/orphaned": float(len(line["orphaned"]))}
            return Point(_prefix(line, several), "step", int(line["step"]), line["time"], values)
        case "evaluation" if "version" not in line:  # of a supervised run
            return Point("heldout/", "step", int(line["step"]), line["time"], _numbers(line))
        case "evaluation":
            measured = {name: value for name, value in line.items() if name.startswith("episode/")}
            counted = {name: line[name] for name in ("episodes", "failed") if name in line}
            values = _numbers({"reward": line["reward"], **line.get("by_source", {}), **measured, **counted})
            return Point("heldout/", "version", int(line["version"]), line["time"], values)
        case _:
            return None


def _prefix(line: Mapping[str, Any], several: bool) -> str:
    return f"{line['policy']}/" if several else ""


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in _NOT_MEASURED
    }


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a recipe as texts by dotted path, for trackers whose settings are not nested."""
    found: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


# ---------------------------------------------------------------- the feed of one tracker


BATCH = 200  # lines that are sent at once


class SentLines(msgspec.Struct):
    """The note of a feed: the `seq` of the last line sent, where in the file it ended, and the tracker's ids."""

    sent: int = 0
    at: int = 0
    ids: dict[str, str] = {}


class Feed(Follower):
    """`open_tracker` is called with the noted ids when there is a first point to send, and again after a failure."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[dict[str, str]], Tracker],
        metrics: Path,
        note: Path,
        *,
        several: bool = False,
        tell: Callable[[str], None] | None = None,
        poll: float = POLL,
    ) -> None:
        super().__init__(name, tell=tell, poll=poll)
        self._open = open_tracker
        self._note = Note(note, SentLines())
        self._several = several
        self._reader = MetricsReader(metrics, _beginning(metrics, self._note.kept.at))
        self._tracker: Tracker | None = None
        self._waiting: list[Point] = []
        self._lines = 0  # read and not sent
        self._last = self._note.kept.sent

    def advance(self) -> bool:
        if not self._lines:
            self._read_on()
        if not self._lines:
            return False
        if self._waiting:
            self._write(self._waiting)
        self._waiting, self._lines = [], 0
        self._note.keep(sent=self._last, at=self._reader.at)
        return True

    def close(self, outcome: Outcome) -> None:
        if self._tracker is not None:
            self._tracker.close(outcome)

    def unsent(self) -> str:
        return _counted(self._lines + self._reader.left())

    def _read_on(self) -> None:
        for line in itertools.islice(self._reader.new(), BATCH):
            self._lines += 1
            number = int(line.get("seq", 0))
            point = point_of(line, several=self._several) if number > self._last else None
            self._last = max(self._last, number)
            if point is not None:
                self._waiting.append(point)

    def _write(self, points: list[Point]) -> None:
        if self._tracker is None:
            self._tracker = self._open(dict(self._note.kept.ids))
            self._note.keep(ids=self._tracker.ids)
        try:
            self._tracker.write(points)
        except BaseException:
            self._tracker = None
            raise


def _beginning(metrics: Path, at: int) -> int:
    """Return `at` where a line begins there, else 0: a supervised run that went back to a checkpoint has written other
    lines since. Their numbers tell which have been sent."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(at - 1, 0))
            return at if file.read(1) == b"\n" else 0
    except FileNotFoundError:
        return 0


def unsent_lines(metrics: Path, note: Path) -> str:
    """Return what has not been sent of a file, as it was noted; empty if that is nothing."""
    return _counted(MetricsReader(metrics, Note(note, SentLines()).kept.at).left())


def _counted(lines: int) -> str:
    return f"{lines} line{'s' * (lines > 1)} of metrics.jsonl" if lines else ""


# ---------------------------------------------------------------- JSON lines


class JsonLines:
    """Appends `{"time": …, "step" or "version": …, "values": {name: number}}` for each point."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    @property
    def ids(self) -> dict[str, str]:
        return {}

    def write(self, points: Sequence[Point]) -> None:
        lines = ({"time": point.time, point.axis: point.step, "values": point.named} for point in points)
        with open(self._path, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def close(self, outcome: Outcome) -> None: ...
