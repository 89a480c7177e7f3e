"""Weights & Biases, MLflow, TensorBoard and OpenTelemetry.

In Weights & Biases each policy and the held-out rewards have their own step axis, because they advance at their own
pace; a resumed run has the same id, and offline each start writes another folder of that id. In MLflow points carry
their own time, so that a server keeps one that is sent again only once. The recipe is written as parameters when the
run is made; a server does not let them change later.

TensorBoard reads event files in RUN/tensorboard: a scalar is one `Event` message in one TFRecord. The package
tensorboardX would write them too, but it imports torch, which takes longer than all else that `rillflow run` does in
its own process. The format is fixed: `event.proto` and `summary.proto` of TensorFlow, framed by
`u64 length | u32 masked CRC-32C of the length | message | u32 masked CRC-32C of the message`.

OpenTelemetry gets the spans of a run, the same as in `rillflow trace`, by OTLP over HTTP while the run goes on. What
was sent is noted in RUN/trackers/opentelemetry.json, so a resumed run goes on after it.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.config.runs import MlflowConfig, WandbConfig
from rillflow.dataflow.episode_history import Episode, ended_episodes, ended_steps
from rillflow.dataflow.ledger.database import snapshot
from rillflow.observe.trackers.feed import Follower, Note, Outcome, Point, Tracked, flat
from rillflow.storage.spans import Span, SpanFollower

if TYPE_CHECKING:
    from rillflow.observe.trackers.otlp import Sender

# ---------------------------------------------------------------- Weights & Biases


UPLOAD = 20.0  # seconds for what is still to be uploaded at the end; the rest stays on disk for `wandb sync`


class Wandb:
    def __init__(self, settings: WandbConfig, run: Tracked) -> None:
        import wandb  # an extra, and seconds to import

        self._id = run.key
        online = settings.mode == "online"
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("W&B has no API key: set WANDB_API_KEY, or observe.trackers.wandb.mode=offline")
        folder = run.folder / "trackers"
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run.name,
            tags=settings.tags,
            mode=settings.mode,
            id=self._id,
            resume="allow" if online else None,
            dir=folder,
            config=dict(run.recipe),
            allow_val_change=True,  # a resumed run may have more steps
            settings=wandb.Settings(console="off", silent=True, finish_timeout=UPLOAD),
        )
        self._defined: set[str] = set()

    @property
    def ids(self) -> dict[str, str]:
        return {"id": self._id}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            axis = point.prefix + point.axis
            for name in {axis, *point.named} - self._defined:
                self._run.define_metric(name, **({"hidden": True} if name == axis else {"step_metric": axis}))
                self._defined.add(name)
            self._run.log({axis: point.step, **point.named})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


# ---------------------------------------------------------------- MLflow


# The limits of a server.
_METRICS, _PARAMETERS, _KEY, _TEXT = 1000, 100, 250, 6000
_REFUSED = re.compile(r"[^\w\-. :/]")  # in a name
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Mlflow:
    def __init__(self, settings: MlflowConfig, run: Tracked) -> None:
        from mlflow import MlflowClient  # an extra, and seconds to import
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(settings.tracking_uri)
        if "id" in run.ids:
            self._id = run.ids["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(settings, run)

    def _create(self, settings: MlflowConfig, run: Tracked) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment)
        made = self._client.create_run(experiment, tags=settings.tags, run_name=settings.name or run.name)
        texts = {_key(name): value[:_TEXT] for name, value in flat(run.recipe).items()}
        for some in _batches([Param(name, value) for name, value in texts.items()], _PARAMETERS):
            self._client.log_batch(made.info.run_id, params=some)
        return str(made.info.run_id)

    @property
    def ids(self) -> dict[str, str]:
        return {"id": self._id}

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(_key(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.named.items()
        ]
        for some in _batches(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, _ENDS[outcome])


def _key(name: str) -> str:
    return _REFUSED.sub("_", name)[:_KEY]


def _batches(items: list[Any], most: int) -> list[list[Any]]:
    return [list(items[first : first + most]) for first in range(0, len(items), most)]


# ---------------------------------------------------------------- TensorBoard

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed
_MASK = 0xA282EAD8
# Keys of protobuf fields: number << 3 | wire type (0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes).
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = 1 << 3 | 1, 2 << 3 | 0, 3 << 3 | 2, 5 << 3 | 2
_VALUE, _TAG, _SIMPLE_VALUE = 1 << 3 | 2, 1 << 3 | 2, 2 << 3 | 5


class EventFile:
    """One event file in `folder`, which is made with it. Nothing is on disk before `flush`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "ab")  # noqa: SIM115 - open until `close`
        self._waiting = [_record(_moment(time.time()) + _bytes(_FILE_VERSION, _VERSION))]

    def add(self, tag: str, value: float, step: int, wall_time: float) -> None:
        number = bytes([_SIMPLE_VALUE]) + struct.pack("<f", value)
        summary = _bytes(_VALUE, _bytes(_TAG, tag.encode()) + number)
        self._waiting.append(_record(_moment(wall_time) + bytes([_STEP]) + _varint(step) + _bytes(_SUMMARY, summary)))

    def flush(self) -> None:
        """OSError where the disk takes no more; a part of the last record may be written then."""
        waiting, self._waiting = b"".join(self._waiting), []
        self._file.write(waiting)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _moment(seconds: float) -> bytes:
    return bytes([_WALL_TIME]) + struct.pack("<d", seconds)


def _bytes(key: int, content: bytes) -> bytes:
    return bytes([key]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Seven bits a byte, lowest first. A negative number is taken as 64 bits."""
    number &= (1 << 64) - 1
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _masked(content: bytes) -> bytes:
    crc = _crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_POLYNOMIAL if entry & 1 else 0)  # noqa: PLW2901
        table.append(entry)
    return table


_TABLE = _table()


def _crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class TensorBoard:
    """Writes a file of its own. A file that could not take something may end in half a record: it is the last then."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    @property
    def ids(self) -> dict[str, str]:
        return {}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.named.items():
                self._file.add(name, value, point.step, point.time)
        try:
            self._file.flush()
        except OSError:
            with suppress(OSError):  # closing flushes first
                self._file.close()
            raise

    def close(self, outcome: Outcome) -> None:
        self._file.close()


# ---------------------------------------------------------------- OpenTelemetry

EVERY = 5.0  # seconds between two looks
BATCH = 500  # spans that are sent at once


class SentSpans(msgspec.Struct):
    """Up to which time everything has been sent; of episodes by the number of their ledger."""

    episodes: dict[int, float] = {}
    steps: float = 0.0
    workers: dict[str, float] = {}


class SpanExport(Follower):
    """Follows the ledgers and the timeline of a run folder."""

    def __init__(self, endpoint: str, run: Path, ledgers: Sequence[Path], *, every: float = EVERY) -> None:
        super().__init__("opentelemetry", poll=every)
        self._endpoint = endpoint
        self._run = run
        self._ledgers = ledgers
        self._note = Note(run / "trackers" / "opentelemetry.json", SentSpans())
        self._sender: Sender | None = None
        self._spans = SpanFollower(run)
        self._waiting: dict[str, list[Span]] = {}  # states that were read and not sent

    def advance(self) -> bool:
        if not self._opened_all():
            return False
        return self._episodes() or self._steps() or self._states()

    def close(self, outcome: Outcome) -> None:
        if self._sender is not None:
            self._sender.close()

    def unsent(self) -> str:
        if not self._opened_all():
            return ""
        numbers = [len(self._ended(ledger)) for ledger in range(len(self._ledgers))]
        episodes = sum(numbers)
        return f"{episodes}{' or more' * (max(numbers) >= BATCH)} episodes" if episodes else ""

    def _opened_all(self) -> bool:
        return all(path.is_file() for path in self._ledgers)

    # ------------------------------------------------------------ what there is to send

    def _episodes(self) -> bool:
        sent = False
        for ledger in range(len(self._ledgers)):
            if found := self._ended(ledger):
                self._opened().send_episodes(found)
                last = max(one.end or 0.0 for one in found)
                self._note.keep(episodes={**self._note.kept.episodes, ledger: last})
                sent = True
        return sent

    def _ended(self, ledger: int) -> list[Episode]:
        """Return the next episodes of a ledger that have ended and were not sent."""
        with snapshot(self._ledgers[ledger]) as reads:
            return ended_episodes(reads, self._note.kept.episodes.get(ledger, 0.0), BATCH)

    def _steps(self) -> bool:
        with ExitStack() as stack:
            ledgers = [stack.enter_context(snapshot(path)) for path in self._ledgers]
            found = ended_steps(ledgers, self._note.kept.steps, BATCH)
        if found:
            self._opened().send_steps(found)
            self._note.keep(steps=max(step.at or 0.0 for step, _ in found))
        return bool(found)

    def _states(self) -> bool:
        """The states of workers that have ended; at the end of the run all."""
        if not self._waiting:
            for worker, spans in self._spans.new(rest=self._stop.is_set()).items():
                sent = self._note.kept.workers.get(worker, 0.0)
                self._waiting[worker] = [span for span in spans if span.end > sent and span.state != "idle"]
        for worker, spans in list(self._waiting.items()):
            while spans:
                self._opened().send_states(worker, spans[:BATCH])
                self._note.keep(workers={**self._note.kept.workers, worker: spans[:BATCH][-1].end})
                del spans[:BATCH]
            del self._waiting[worker]
        return False

    def _opened(self) -> Sender:
        if self._sender is None:
            from rillflow.observe.trackers.otlp import Sender  # an extra

            self._sender = Sender(self._endpoint, self._run.name)
        return self._sender
