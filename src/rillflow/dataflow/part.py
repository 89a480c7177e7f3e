"""What every part of the ledger is made of: the database, the rules of the run and the clock."""

from __future__ import annotations

from rillflow.contracts import Clock
from rillflow.dataflow.database import Database
from rillflow.dataflow.rules import Rules


class Part:
    def __init__(self, db: Database, rules: Rules, clock: Clock) -> None:
        self._db = db
        self._rules = rules
        self._clock = clock
