"""JSON lines with the names that all trackers use, for programs that read one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rillflow.observe.follower import Outcome
from rillflow.observe.trackers.base import Point


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
