"""TensorBoard event files, written from `metrics.jsonl` as it grows: one writer, whatever process made a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from rillflow.observe.metrics import MetricsReader


class TensorBoard:
    """Writes nothing, not even its folder, before the first `update` that finds something."""

    def __init__(self, metrics: Path, folder: Path) -> None:
        self._reader = MetricsReader(metrics)
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def update(self) -> None:
        """Write what is new; cheap when nothing is."""
        for line in self._reader.new():
            match line.get("event"):
                case None:
                    self._write("", line, int(line["step"]))
                case "evaluation":
                    self._write("heldout/", {"reward": line["reward"]}, int(line["version"]))

    def close(self) -> None:
        if self._writer is not None:
            self.update()
            self._writer.close()

    def _write(self, prefix: str, values: dict[str, Any], step: int) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), write_to_disk=True)
        for name, value in values.items():
            if isinstance(value, int | float) and name not in ("step", "version", "time"):
                self._writer.add_scalar(prefix + name, value, step)
