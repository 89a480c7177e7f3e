"""The ledger of a run as a reader sees it: read-only, one moment of it, whether a service writes it or not.

A snapshot keeps the log from being copied into the ledger's file for as long as it is open: hold it for one look.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rillflow.dataflow.ledger.database import Value, storage_error
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.errors import CorruptData, RunError


class Snapshot:
    """A read-only connection, read like a `Database`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.row_factory = sqlite3.Row
        self.connection = connection

    def all(self, query: str, values: Sequence[Value] = ()) -> list[sqlite3.Row]:
        return self.connection.execute(query, values).fetchall()

    def value(self, query: str, values: Sequence[Value] = ()) -> Any:
        """The first column of the first row, or None."""
        row = self.connection.execute(query, values).fetchone()
        return None if row is None else row[0]


@contextmanager
def snapshot(path: Path) -> Iterator[Snapshot]:
    """The ledger at `path` as it was last committed: all queries inside see the same moment."""
    if not path.is_file():
        raise RunError(f"there is no ledger {path}", "give the folder of a run that has been started")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")
            reads = Snapshot(connection)
            _check_format(reads, path)
            yield reads
    except sqlite3.Error as error:
        raise storage_error(path, error) from error


def _check_format(reads: Snapshot, path: Path) -> None:
    found = reads.value("SELECT value FROM meta WHERE key = 'format'")
    if found != str(FORMAT):
        raise CorruptData(
            f"{path} has ledger format {found or 'none'}, this version reads {FORMAT}",
            "use the version of rillflow that wrote the run",
        )
