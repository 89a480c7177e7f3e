"""`metrics.jsonl` of a supervised run: one line for each step and each look at the held-out rows.

Invariant: the lines are those of the line of weights that lives, each once, and numbered (`seq`) from 1. A run that
goes on from the checkpoint of step c takes back what it had written about later steps, and writes it again under the
same numbers, so that a tracker is sent each of them once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rillflow.storage import disk_errors, write_atomic


class Journal:
    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._lines = len(self.read())

    def read(self) -> list[dict[str, Any]]:
        """Its lines; half a line that a crash left is none."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def take_back(self, step: int) -> None:
        """Only what was written up to this step stays."""
        lines = [line for line in self.read() if line["step"] <= step]
        self._lines = len(lines)
        write_atomic(self._path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def add(self, step: int, values: Mapping[str, float], event: str | None = None) -> None:
        self._lines += 1
        kind = {} if event is None else {"event": event}
        line = {"step": step, "seq": self._lines, "time": self._now(), **kind, **values}
        with disk_errors(self._path), open(self._path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def sync(self) -> None:
        """What was added outlives a power failure."""
        if self._path.exists():
            with disk_errors(self._path), open(self._path, "ab") as file:
                os.fsync(file.fileno())
