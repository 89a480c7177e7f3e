"""Reads what a run wrote down about itself (`metrics.jsonl`): one JSON object a line, steps and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Metrics:
    """Steps and evaluations of the live line of weights: a rollback takes back those of the versions that died."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)


class MetricsReader:
    """Follows the file: each call of `new` yields the lines that have been completed since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._at += len(line)
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # a line torn by a crash: what it said is in the ledger


def read_metrics(path: Path) -> Metrics:
    metrics = Metrics()
    for line in MetricsReader(path).new():
        match line.get("event"):
            case "rollback":
                metrics.rollbacks.append(line)
                kept = int(line["version"])
                metrics.steps = [step for step in metrics.steps if step["version"] <= kept]
                metrics.evaluations = [done for done in metrics.evaluations if done["version"] <= kept]
            case "evaluation":
                metrics.evaluations.append(line)
            case None:
                metrics.steps.append(line)
    return metrics
