"""What every part of the ledger is made of: the database, the rules of the run and the clock."""

from __future__ import annotations

from dataclasses import dataclass

from rillflow.contracts import Clock
from rillflow.dataflow.database import Database
from rillflow.dataflow.rules import Rules


@dataclass(frozen=True)
class Base:
    db: Database
    rules: Rules
    clock: Clock


class Part:
    def __init__(self, base: Base) -> None:
        self._db = base.db
        self._rules = base.rules
        self._clock = base.clock
