"""TensorBoard event files, written from `metrics.jsonl` as it grows: one writer, whatever process made a number.

A run never fails for its curves: when they cannot be written (a full disk), that is said once and no more is tried.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from rillflow.observe.event_file import EventFile
from rillflow.observe.metrics import MetricsReader

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes nothing, not even its folder, before the first `update` that finds something."""

    def __init__(self, metrics: Path, folder: Path, *, several: bool = False) -> None:
        """`several` policies each have their own curves, under their names."""
        self._several = several
        self._reader = MetricsReader(metrics)
        self._folder = folder
        self._file: EventFile | None = None
        self._broken = False

    def update(self) -> None:
        """Write what is new; cheap when nothing is."""
        if self._broken:
            return
        try:
            for line in self._reader.new():
                self._write(line)
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            log.warning("no more TensorBoard files: %s", error)
            self._give_up()

    def close(self) -> None:
        if self._file is not None and not self._broken:
            self.update()
        if self._file is not None and not self._broken:
            self._file.close()

    def _give_up(self) -> None:
        self._broken = True
        if self._file is not None:
            with suppress(OSError):  # closing flushes first
                self._file.close()

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
        if self._file is None:
            self._file = EventFile(self._folder)
        for name, value in values.items():
            if isinstance(value, int | float) and name not in ("step", "version", "time", "seq"):
                self._file.add(prefix + name, float(value), step, time)
