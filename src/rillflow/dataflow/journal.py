"""`metrics.jsonl`: one line per committed step, evaluation and rollback, each exactly once.

The lines are written to the ledger with the change they tell of; this file is a copy for people and plots. Every
line has its number `seq`, so after a crash the copy goes on where it stopped.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rillflow.dataflow.ledger import Ledger

log = logging.getLogger(__name__)


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = self._mend()

    def _mend(self) -> int:
        """The number of the last whole line; what a crash left after it is cut off."""
        if not self._path.exists():
            return 0
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._path.write_bytes(whole)
        lines = whole.splitlines()
        return int(json.loads(lines[-1])["seq"]) if lines else 0

    def catch_up(self, ledger: Ledger) -> None:
        """Append what the ledger has committed since. A disk that refuses is reported and tried again later."""
        news = ledger.events_after(self._last)
        if not news:
            return
        try:
            with open(self._path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for _, line in news))
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error)
            self._last = self._mend()
            return
        self._last = news[-1][0]
