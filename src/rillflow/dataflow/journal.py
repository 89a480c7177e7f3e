"""`metrics.jsonl`: one line per committed step, evaluation and rollback, each exactly once.

The lines are written to the ledger with the change they tell of; this file is a copy for people and plots. Every
line has its number `seq`, so after a crash the copy goes on where it stopped.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.tables import NEWEST

log = logging.getLogger(__name__)


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = self._mend()
        self._torn = False  # the file may end in half a line

    def _mend(self) -> int:
        """The number of the last whole line; a torn rest after it is truncated, which needs no space."""
        if not self._path.exists():
            return 0
        lines = self._path.read_bytes().splitlines(keepends=True)
        while lines and not _number(lines[-1]):
            lines.pop()
        os.truncate(self._path, sum(len(line) for line in lines))
        return _number(lines[-1]) if lines else 0

    def catch_up(self, ledger: Ledger, until: int = NEWEST) -> None:
        """Append the lines to number `until`, which are durable. A disk that refuses is reported and tried again."""
        try:
            if self._torn:
                self._last, self._torn = self._mend(), False
            news = ledger.events_after(self._last, until)
            if not news:
                return
            self._torn = True
            with open(self._path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for _, line in news))
            self._last, self._torn = news[-1][0], False
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error)


def _number(line: bytes) -> int:
    """Return the line's `seq`; 0 if it is not a whole line."""
    try:
        value = json.loads(line)
    except ValueError:
        return 0
    number = value.get("seq") if isinstance(value, dict) else None
    return number if isinstance(number, int) and line.endswith(b"\n") else 0
