"""TensorBoard event files, written from `metrics.jsonl` as it grows: one writer, whatever process made a number.

A run never fails for its curves: when they cannot be written (a full disk), that is said once and no more is tried.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from rillflow.observe.metrics import MetricsReader

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes nothing, not even its folder, before the first `update` that finds something."""

    def __init__(self, metrics: Path, folder: Path, *, several: bool = False) -> None:
        """`several` policies each have their own curves, under their names."""
        self._several = several
        self._reader = MetricsReader(metrics)
        self._folder = folder
        self._writer: EventsWriter | None = None
        self._broken = False

    def update(self) -> None:
        """Write what is new; cheap when nothing is."""
        if self._broken:
            return
        try:
            for line in self._reader.new():
                self._write(line)
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            log.warning("no more TensorBoard files: %s", error)
            self._give_up()

    def close(self) -> None:
        if self._writer is not None and not self._broken:
            self.update()
            self._writer.close()

    def _give_up(self) -> None:
        self._broken = True
        if self._writer is not None:
            # Its own close would flush first, fail again and leave the file open.
            with suppress(OSError):
                self._writer._py_recordio_writer.close()

    def _write(self, line: dict[str, Any]) -> None:
        match line.get("event"):
            case None:
                prefix = f"{line['policy']}/" if self._several else ""
                self._write_scalars(prefix, line, int(line["step"]), line["time"])
            case "evaluation":
                measured = {name: value for name, value in line.items() if name.startswith("episode/")}
                values = {"reward": line["reward"], **line.get("by_source", {}), **measured}
                self._write_scalars("heldout/", values, int(line["version"]), line["time"])

    def _write_scalars(self, prefix: str, values: dict[str, Any], step: int, time: float) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
        for name, value in values.items():
            if isinstance(value, int | float) and name not in ("step", "version", "time", "seq"):
                self._writer.write_event(Event(wall_time=time, step=step, summary=scalar(prefix + name, value)))
