"""SQLite as the ledger uses it: transitions are applied at once, many of them share one durable commit.

A transition runs inside `change()`: all of it is applied or nothing. What it changed is in the log after the next
`write()`, and durable after the `sync()` that follows; a service answers its callers after that. `sync()` may run in
another thread, so that transitions go on while the disk works. A change that breaks a constraint is rolled back alone
and is a BadRequest; the others of the open transaction stay. When the disk refuses a write, the whole open transaction
is rolled back, and `on_abandon` tells those who wait for it: nothing of it may be acknowledged.

The log is copied into the database's file by SQLite inside a commit, or, after `checkpoint_beside()`, by `checkpoint()`
in another thread.

Counters and tallies (`Totals`) are kept in memory and written once, at the end of a change.

A `snapshot` is for readers outside of the service: read-only, one moment of the ledger, whether a service writes it or
not. While it is open, the log is not copied: hold it for one look.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rillflow.contracts import Clock
from rillflow.dataflow.ledger.schema import FORMAT, TABLES
from rillflow.dataflow.ledger.tables import Record
from rillflow.dataflow.rules import Rules
from rillflow.errors import BadRequest, CorruptData, DiskFault, DiskFull, RillflowError, RunError, StorageError
from rillflow.storage import fsync_folder

log = logging.getLogger(__name__)

Value = str | int | float | None
R = TypeVar("R", bound=Record)
LOG_BYTES = 16 << 20  # of the log between two copies into the database's file (`group_commit.COPY_EVERY`)
_STATEMENTS = 512  # prepared and kept: more than the ledger has
# Faults of the values that a statement was given: a broken constraint, a number or a type that SQLite does not take.
_OWN_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_MAY_PASS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN)


def storage_error(path: Path, error: sqlite3.Error) -> StorageError:
    """Return an error of the error tree for one of SQLite's."""
    text = str(error)
    if "full" in text:
        return DiskFull(
            f"no space left while writing {path}",
            "free some space and run `rillflow resume RUN`: nothing that was acknowledged is lost",
        )
    if any(said in text for said in ("malformed", "not a database", "no such table")):
        return CorruptData(f"the ledger {path} is damaged: {text}", "restore the run folder from a copy")
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _MAY_PASS:
        return DiskFault(f"the ledger {path} cannot be written: {text}", "check the disk; nothing was acknowledged")
    return StorageError(f"the ledger {path} refused a change: {text}", "check the folder and the log")


class Database:
    """One connection, used from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_abandon: Callable[[RillflowError], None] = lambda error: None
        self.rollbacks = 0  # changes that were taken back: rows that are kept in memory may be wrong since
        self.writes = 0  # changes before the last write are never rolled back
        self._inside = False
        self._alone = False  # the change at work is the only one of its transaction
        self._clean = 0
        self._totals: list[Totals] = []
        self._counters = self.totals("counters", 1)
        self._meta: dict[str, str | None] = {}  # as of `_meta_of` rollbacks
        self._meta_of = -1
        self._last_event = 0  # as of `_event_of` rollbacks
        self._event_of = -1
        self._log: int | None = None  # of the write-ahead log, to sync it by
        self._copier: sqlite3.Connection | None = None  # of checkpoints beside this connection
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, cached_statements=_STATEMENTS)
        except sqlite3.Error as error:
            raise storage_error(path, error) from error
        self._connection.row_factory = sqlite3.Row
        self._reader = self._connection.cursor()  # of rows that become structs
        self._reader.row_factory = None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._connection.close()
            raise storage_error(path, error) from error
        except RillflowError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA busy_timeout = 5000")
        self._connection.execute("PRAGMA journal_mode = WAL")
        # SQLite keeps the log whole across checkpoints; that its end is on the disk is what `sync` sees to.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")
        self._connection.execute("PRAGMA cache_size = -16384")  # kibibytes
        self._connection.execute("PRAGMA temp_store = MEMORY")  # a savepoint may roll these back, too
        self._check_format()  # before the tables: those of another format may have other columns
        self._connection.executescript(TABLES)
        self._clean = self._connection.total_changes

    def _check_format(self) -> None:
        if not self.value("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            return
        _check_format(self.path, str(self.meta("format", FORMAT)))

    # ------------------------------------------------------------ transactions

    @contextmanager
    def change(self) -> Iterator[None]:
        """All or nothing of what happens inside; an inner `change` is part of the outer one."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            # The first change of a transaction needs no savepoint: to take it back is to take back the transaction.
            self._alone = not self._connection.in_transaction
            self.run("BEGIN IMMEDIATE" if self._alone else "SAVEPOINT change")
            try:
                yield
                self.write_totals()
            except _OWN_FAULTS as error:
                self._roll_back()
                log.exception("a change was refused and rolled back")
                raise BadRequest(f"the ledger cannot hold this: {error}", "check the numbers and names sent") from error
            except sqlite3.Error:
                raise
            except OverflowError as error:
                self._roll_back()
                raise BadRequest(f"a number is out of range: {error}", "64 bits, signed, are the limit") from error
            except BaseException:
                self._roll_back()
                raise
            finally:
                if not self._alone and self._connection.in_transaction:
                    self.run("RELEASE change")
        except sqlite3.Error as error:
            raise self._abandon(error) from error
        finally:
            self._inside = False
        if not self.dirty:
            self.write()  # nothing was changed: do not keep the snapshot open

    def _roll_back(self) -> None:
        self.rollbacks += 1
        self.run("ROLLBACK" if self._alone else "ROLLBACK TO change")
        if self._alone:
            self._clean = self._connection.total_changes

    @property
    def dirty(self) -> bool:
        """True if changes wait for `write`."""
        return self._connection.total_changes != self._clean

    def commit(self) -> None:
        """Make every change so far durable."""
        self.write()
        self.sync()

    def sync(self) -> None:
        """What was written before is durable when this returns. Any thread may call it, one at a time."""
        try:
            if self._log is None:
                self._log = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
                fsync_folder(self.path.parent)
            os.fdatasync(self._log)
        except OSError as error:
            raise StorageError(f"the log of {self.path} was not synced: {error}", "check the disk") from error

    def reserve_log(self, size: int = LOG_BYTES) -> None:
        """Fill the rest of the log's first `size` bytes with zeros, before others use the database.

        A sync of a file that has grown also writes the file's new size, which takes as long as the data. SQLite reads
        zeros as the end of the log. On a disk that is nearly full the log grows as it is written.
        """
        try:
            with open(f"{self.path}-wal", "r+b") as file:
                disk, held = os.fstatvfs(file.fileno()), file.seek(0, os.SEEK_END)
                if held < size < disk.f_bavail * disk.f_frsize / 4:
                    file.write(bytes(size - held))
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"the log of {self.path} was not reserved: {error}", "check the disk") from error

    def write(self) -> None:
        """Every change so far is in the log."""
        try:
            if self._connection.in_transaction:
                self.run("COMMIT")
                self.writes += 1
            self._clean = self._connection.total_changes
        except sqlite3.Error as error:
            raise self._abandon(error) from error

    def checkpoint_beside(self) -> None:
        """No commit copies the log any more: call `checkpoint` now and then."""
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")

    def checkpoint(self) -> bool:
        """Copy the log into the database's file, as far as no reader uses it; return whether all of it was copied. Only
        then is the log reset, by the next transaction. Any thread may call it, one at a time."""
        try:
            if self._copier is None:
                self._copier = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            _, frames, copied = self._copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return bool(frames == copied)
        except sqlite3.Error as error:
            raise storage_error(self.path, error) from error

    @property
    def changes(self) -> int:
        """Rows that were changed since the database was opened."""
        return self._connection.total_changes

    def _abandon(self, error: sqlite3.Error) -> StorageError:
        """Take the whole open transaction back."""
        self.rollbacks += 1
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._clean = self._connection.total_changes
        told = storage_error(self.path, error)
        self.on_abandon(told)
        return told

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._connection.close()

    # ------------------------------------------------------------ statements

    def run(self, statement: str, values: Sequence[Value] = ()) -> int:
        """Returns the number of rows changed."""
        return self._connection.execute(statement, values).rowcount

    def many(self, statement: str, values: Sequence[Sequence[Value]]) -> None:
        if values:
            self._connection.executemany(statement, values)

    def rows(self, kind: type[R], query: str, values: Sequence[Value] = ()) -> list[R]:
        """The rows that a query finds. It selects the columns of the struct, in their order."""
        return [kind(*row) for row in self._reader.execute(query, values).fetchall()]

    def row(self, kind: type[R], query: str, values: Sequence[Value] = ()) -> R | None:
        found = self._reader.execute(query, values).fetchall()
        return kind(*found[0]) if found else None

    def one(self, query: str, values: Sequence[Value] = ()) -> Any:
        """The first row, to be taken apart, or None."""
        return self._connection.execute(query, values).fetchone()

    def all(self, query: str, values: Sequence[Value] = ()) -> list[Any]:
        """The rows that a query finds, to be taken apart."""
        return self._connection.execute(query, values).fetchall()

    def column(self, query: str, values: Sequence[Value] = ()) -> list[Any]:
        """The first column of each row."""
        return [row[0] for row in self._reader.execute(query, values).fetchall()]

    def value(self, query: str, values: Sequence[Value] = ()) -> Any:
        """The first column of the first row, or None."""
        row = self.one(query, values)
        return None if row is None else row[0]

    # ------------------------------------------------------------ small values

    def meta(self, key: str, default: Any = None) -> Any:
        if self._meta_of != self.rollbacks:
            self._meta, self._meta_of = {}, self.rollbacks
        if key not in self._meta:
            self._meta[key] = self.value("SELECT value FROM meta WHERE key = ?", (key,))
        text = self._meta[key]
        return default if text is None else json.loads(text)

    def set_meta(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))
        self._meta[key] = text

    def totals(self, table: str, keys: int) -> Totals:
        """Sums in a table whose first `keys` columns are the key."""
        self._totals.append(Totals(self, table, keys))
        return self._totals[-1]

    def counter(self, name: str) -> int:
        return self._counters.sums().get((name,), 0)

    def count(self, name: str, by: int = 1) -> None:
        self._counters.add(by, name)

    def clear_counter(self, name: str) -> None:
        self._counters.add(-self.counter(name), name)

    def added(self) -> None:
        """Note that a total has changed. Inside a transaction it is written at its end, otherwise at once."""
        if not self._inside:
            self.write_totals()

    def write_totals(self) -> None:
        """Write the totals so far, for queries that read them."""
        for totals in self._totals:
            totals.write()

    def event(self, line: dict[str, Any]) -> None:
        """Add a line for `metrics.jsonl`; it is written with the change that it describes."""
        # msgspec writes numbers that JSON does not know (a diverged loss) as null.
        self.run("INSERT INTO events (line) VALUES (?)", (msgspec.json.encode(line).decode(),))
        self._event_of = -1

    @property
    def last_event(self) -> int:
        """The number of the last such line."""
        if self._event_of != self.rollbacks:
            self._last_event = int(self.value("SELECT ifnull(max(seq), 0) FROM events"))
            self._event_of = self.rollbacks
        return self._last_event


class Totals:
    """Sums by key, kept in a table and in memory."""

    def __init__(self, db: Database, table: str, keys: int) -> None:
        self._db = db
        self._query = f"SELECT * FROM {table}"
        self._statement = f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * (keys + 1))})"
        self._sums: dict[tuple[str, ...], int] = {}
        self._changed: set[tuple[str, ...]] = set()
        self._read_at = -1  # the number of rollbacks at that time

    def sums(self) -> dict[tuple[str, ...], int]:
        """Return all sums by their keys. They are read again after a rollback."""
        if self._read_at != self._db.rollbacks:
            self._sums = {tuple(row[:-1]): row[-1] for row in self._db.all(self._query)}
            self._changed.clear()
            self._read_at = self._db.rollbacks
        return self._sums

    def add(self, by: int, *key: str) -> None:
        if by:
            sums = self.sums()
            sums[key] = sums.get(key, 0) + by
            self._changed.add(key)
            self._db.added()

    def write(self) -> None:
        """Write the sums that have changed."""
        if self._changed:
            sums = self.sums()
            self._db.many(self._statement, [(*key, sums[key]) for key in self._changed])
            self._changed.clear()


@dataclass(frozen=True)
class Base:
    """The objects that every part of the ledger shares."""

    db: Database
    rules: Rules
    clock: Clock


class Part:
    """A part of the ledger: the only writer of its tables."""

    def __init__(self, base: Base) -> None:
        self._db = base.db
        self._rules = base.rules
        self._clock = base.clock


# ---------------------------------------------------------------- readers outside of the service


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
            _check_format(path, reads.value("SELECT value FROM meta WHERE key = 'format'"))
            yield reads
    except sqlite3.Error as error:
        raise storage_error(path, error) from error


def _check_format(path: Path, found: str | None) -> None:
    if found != str(FORMAT):
        raise CorruptData(
            f"{path} has ledger format {found or 'none'}, this version reads {FORMAT}",
            "use the version of rillflow that wrote the run",
        )
