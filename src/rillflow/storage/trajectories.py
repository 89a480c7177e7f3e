"""Writes trajectories into one SQLite file that stays within bounds, and reads them during the run and afterwards.

Invariants: a kind never has more trajectories than its bound, and the file's pages never hold more bytes than asked
for; each trajectory is kept whole or not at all, after kill -9 too; a writer that is refused by the disk leaves the
file as it was. Trajectories are removed so that the rest stays spread over the run: the newest quarter of a kind stays
whole, and of the older ones the one with the closest neighbours in time goes first, the oldest of equals.

A reader holds nothing open between two calls, so it may be used from any thread and follows a live run. It never
writes; a folder on a read-only disk can be read.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rillflow.errors import CorruptData, DataError, DiskFull, StorageError
from rillflow.storage.trajectory_format import FILE, Trajectory, TrajectoryInfo, decode_body, encode_body

FORMAT = 1
LEAST_BYTES = 1 << 20  # a file of less holds little but its tables
_LARGEST_SHARE = 16  # no trajectory takes more than this part of the bytes
_SPARE = 1 << 16  # bytes that a row, its place in the indexes and split pages may take besides its body
_LOG_BYTES = 1 << 20  # of the write-ahead log, between two trajectories

COLUMNS = TrajectoryInfo.__struct_fields__
LISTS = ("policies", "roles")  # as JSON


def quoted(*names: str) -> str:
    """Return columns as SQL has them: `group` is a word of its own there."""
    return ", ".join(f'"{name}"' for name in names)


_REALS = ("time", "reward", "advantage", "gap", "seconds")
_INTEGERS = ("step", "place", "tokens", "trained", "samples", "calls", "forks", "oldest", "newest", "truncated")
_TYPES = dict.fromkeys(_REALS, "REAL") | dict.fromkeys(_INTEGERS, "INTEGER")
_TABLES = f"""
CREATE TABLE trajectories (
    n INTEGER PRIMARY KEY,           -- in the order in which they were kept
    size INTEGER NOT NULL,           -- bytes of the body
    {", ".join(f"{quoted(name)} {_TYPES.get(name, 'TEXT')}" for name in COLUMNS)}
);
CREATE TABLE bodies (n INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE UNIQUE INDEX trajectories_id ON trajectories (id);
CREATE INDEX trajectories_kept ON trajectories (kept, time, size);
CREATE INDEX trajectories_time ON trajectories (time);
CREATE INDEX trajectories_step ON trajectories (step);
CREATE INDEX trajectories_reward ON trajectories (reward);
PRAGMA user_version = {FORMAT};
"""


@dataclass(frozen=True)
class Bounds:
    """`most` trajectories of each kind (none of a kind that it does not name), and the bytes of the file."""

    bytes: int
    most: Mapping[str, int]


class TrajectoryStore:
    """The one writer of a file. Calls may come from any thread, one at a time."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self.path = path
        self._bounds = bounds
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise store_error(path, error) from error
        try:
            self._prepare()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.Error):
                raise store_error(path, error) from error
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA busy_timeout = 5000")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA wal_autocheckpoint = 64")
        run(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        found = self._number("PRAGMA user_version")
        if found not in (0, FORMAT):
            raise CorruptData(
                f"{self.path} has format {found}, this version writes {FORMAT}", "use the version that wrote it"
            )
        if found == 0:
            self._connection.executescript(f"BEGIN IMMEDIATE;{_TABLES}COMMIT;")
        self._shrink()

    def _shrink(self) -> None:
        """Bring a file that was written under wider bounds within these."""
        for kind in self._kinds():
            self._thin(kind, self._most(kind))
        self._make_room(0)
        if self._number("PRAGMA page_count") * self._page > self._bounds.bytes:
            self._connection.execute("VACUUM")

    def close(self) -> None:
        self._connection.close()

    # ------------------------------------------------------------ adding

    def add(self, trajectory: Trajectory) -> bool:
        """Keep a trajectory, in place of one with the same id; False where the bounds leave no place for it."""
        info, body = trajectory.info, encode_body(trajectory)
        most = self._most(info.kept)
        if most < 1 or len(body) > self._bounds.bytes // _LARGEST_SHARE:
            return False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._remove([n for (n,) in self._connection.execute(_BY_ID, (info.id,))])
                self._thin(info.kept, most - 1)
                self._make_room(len(body))
                self._insert(info, body)
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself takes it back when a disk is full
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise store_error(self.path, error) from error
        return True

    def get(self, name: str) -> Trajectory | None:
        """Return the trajectory of this id, if it is kept."""
        try:
            return read_one(self._connection, name)
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error

    def _insert(self, info: TrajectoryInfo, body: bytes) -> None:
        marks = ", ".join("?" * (len(COLUMNS) + 1))
        names = quoted("size", *COLUMNS)
        row = self._connection.execute(
            f"INSERT INTO trajectories ({names}) VALUES ({marks})", (len(body), *to_row(info))
        )
        self._connection.execute("INSERT INTO bodies VALUES (?, ?)", (row.lastrowid, body))

    # ------------------------------------------------------------ making room

    def _most(self, kind: str) -> int:
        return self._bounds.most.get(kind, 0)

    def _kinds(self) -> list[str]:
        return [kind for (kind,) in self._connection.execute("SELECT DISTINCT kept FROM trajectories")]

    def _thin(self, kind: str, most: int) -> None:
        """Leave `most` of a kind."""
        if self._number("SELECT count(*) FROM trajectories WHERE kept = ?", kind) <= most:
            return
        rows = self._connection.execute(
            "SELECT n, time FROM trajectories WHERE kept = ? ORDER BY time, n", (kind,)
        ).fetchall()
        times = np.array([time for _, time in rows])
        self._remove([rows[place][0] for place in to_remove(times, len(rows) - most)])

    def _make_room(self, size: int) -> None:
        """Take away from the kinds that need the most bytes until a body of this size has a place."""
        while self._used + size + _SPARE > self._bounds.bytes:
            found = self._connection.execute(
                "SELECT kept, count(*) FROM trajectories GROUP BY kept ORDER BY sum(size) DESC, kept LIMIT 1"
            ).fetchone()
            if found is None:
                return
            kind, count = found
            self._thin(kind, count - max(1, count // 16))

    def _remove(self, numbers: list[int]) -> None:
        for table in ("trajectories", "bodies"):
            self._connection.executemany(f"DELETE FROM {table} WHERE n = ?", [(n,) for n in numbers])

    @property
    def _page(self) -> int:
        return self._number("PRAGMA page_size")

    @property
    def _used(self) -> int:
        """The bytes of the pages that hold something: the others are written again first."""
        return (self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")) * self._page

    def _number(self, query: str, *values: str) -> int:
        return int(self._connection.execute(query, values).fetchone()[0])


_BY_ID = "SELECT n FROM trajectories WHERE id = ?"


def to_remove(times: npt.NDArray[np.float64], count: int) -> list[int]:
    """Return the places of `count` of these times, which are in order, whose removal leaves the others spread best."""
    old = np.arange(len(times) - (len(times) - count) // 4)
    removed: list[int] = []
    while len(removed) < count:
        at = times[old]
        place = 1 + int(np.argmin(at[2:] - at[:-2])) if len(old) > 2 else len(old) - 1
        removed.append(int(old[place]))
        old = np.delete(old, place)
    return removed


# ------------------------------------------------------------ rows


def to_row(info: TrajectoryInfo) -> list[object]:
    values = msgspec.structs.asdict(info)
    return [json.dumps(values[name]) if name in LISTS else values[name] for name in COLUMNS]


def of_row(row: tuple[object, ...]) -> TrajectoryInfo:
    """`row` has the values of `COLUMNS`."""
    values = dict(zip(COLUMNS, row, strict=True))
    values |= {name: json.loads(str(values[name])) for name in LISTS}
    return msgspec.convert(values | {"truncated": bool(values["truncated"])}, TrajectoryInfo)


def read_one(connection: sqlite3.Connection, name: str) -> Trajectory | None:
    row = connection.execute(
        f"SELECT {quoted(*COLUMNS)}, body FROM trajectories JOIN bodies USING (n) WHERE id = ?", (name,)
    ).fetchone()
    return None if row is None else decode_body(of_row(row[:-1]), row[-1])


def store_error(path: Path, error: sqlite3.Error) -> StorageError:
    """Return the error of the error tree for one of SQLite's."""
    text = str(error)
    if "full" in text:
        return DiskFull(f"no space left while writing {path}", "free some space: the run goes on without it")
    if "malformed" in text or "not a database" in text:
        return CorruptData(f"{path} is damaged: {text}", "remove it: a run keeps new trajectories without it")
    return StorageError(f"{path} cannot be used: {text}", "check the folder and its rights")


Names = str | Iterable[str] | None
Range = int | tuple[int | None, int | None] | None
_RUN_FILE = "recipe.yaml"
_NOT_WRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


class Trajectories:
    """The kept trajectories of a run that pass the filters of `rillflow.trajectories`.

    Example:

        kept = rillflow.trajectories("runs/quickstart-20261118-033123", lane="train")
        print(len(kept), kept.infos(order="-reward", limit=5))
    """

    def __init__(
        self,
        run: str | Path,
        *,
        step: Range = None,
        policy: Names = None,
        role: Names = None,
        reward: tuple[float | None, float | None] | None = None,
        version: Range = None,
        status: Names = None,
        lane: Names = None,
        kept: Names = None,
        prompt: Names = None,
    ) -> None:
        root = Path(run)
        self._path = root / FILE
        if not self._path.is_file() and not (root / _RUN_FILE).is_file():
            raise DataError(f"{run} is not a run folder", "give a folder that `rillflow run` made, such as runs/…")
        wheres = [
            _between("step", "step", _pair(step)),
            _between("reward", "reward", reward),
            _between("newest", "oldest", _pair(version)),
            *(_one_of(name, wanted) for name, wanted in (("status", status), ("lane", lane), ("kept", kept))),
            _one_of("prompt", prompt),
            _any_of("policies", policy),
            _any_of("roles", role),
        ]
        self._where = " AND ".join(where for where, _ in wheres)
        self._values = [value for _, values in wheres for value in values]

    def __len__(self) -> int:
        return int(self._all(f"SELECT count(*) FROM trajectories WHERE {self._where}", self._values, [(0,)])[0][0])

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield them in the order of their time, each read when it is asked for."""
        for (name,) in self._all(f"SELECT id FROM trajectories WHERE {self._where} ORDER BY time, n", self._values):
            found = self._one(name)
            if found is not None:  # it may have made room for another since
                yield found

    def infos(self, order: str = "-time", offset: int = 0, limit: int = 100) -> list[TrajectoryInfo]:
        """Return the infos from `offset` on, at most `limit`, ordered by a field; `-` before its name: falling.
        Trajectories that have no value come last."""
        name, falling = order.removeprefix("-"), order.startswith("-")
        if name not in COLUMNS or name in LISTS:
            raise DataError(f"trajectories are not ordered by {order!r:.80}", f"one of: {', '.join(COLUMNS)}")
        way = "DESC" if falling else "ASC"
        query = (
            f"SELECT {quoted(*COLUMNS)} FROM trajectories WHERE {self._where} "
            f"ORDER BY {quoted(name)} {way} NULLS LAST, n {way} LIMIT ? OFFSET ?"
        )
        return [of_row(row) for row in self._all(query, [*self._values, limit, offset])]

    def get(self, name: str) -> Trajectory:
        """Return the trajectory of this id, whatever the filters; DataError where none is kept."""
        found = self._one(name)
        if found is None:
            raise DataError(
                f"no trajectory {name!r:.80} is kept in {self._path.parent}",
                "`rillflow show RUN` lists those that are",
            )
        return found

    # ------------------------------------------------------------ the file

    def _one(self, name: str) -> Trajectory | None:
        if not self._path.is_file():
            return None
        try:
            with closing(self._connect()) as connection:
                return read_one(connection, name)
        except sqlite3.Error as error:
            raise store_error(self._path, error) from error

    def _all(self, query: str, values: Sequence[Any], nothing: Sequence[Any] = ()) -> Sequence[Any]:
        """Return the rows of a query, or `nothing` if the run has kept no trajectory yet."""
        if not self._path.is_file():
            return nothing
        try:
            with closing(self._connect()) as connection:
                if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trajectories'").fetchone():
                    return nothing  # its writer has just made it
                return connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise store_error(self._path, error) from error

    def _connect(self) -> sqlite3.Connection:
        """Open the file for reading. On a read-only disk, a file that no process writes is read without its log."""
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=5.0)
        try:
            connection.execute("SELECT 1 FROM sqlite_master")
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF not in _NOT_WRITABLE:
                raise
            return sqlite3.connect(f"{uri}&immutable=1", uri=True)
        return connection


# ------------------------------------------------------------ filters

Where = tuple[str, list[Any]]


def _pair(wanted: Range) -> tuple[int | None, int | None] | None:
    return (wanted, wanted) if isinstance(wanted, int) else wanted


def _between(above: str, below: str, wanted: tuple[float | None, float | None] | None) -> Where:
    """Let pass what lies between two numbers: column `above` not below the first, `below` not above the second."""
    if wanted is None:
        return "1", []
    ends = [(f"{above} >= ?", wanted[0]), (f"{below} <= ?", wanted[1])]
    given = [(where, value) for where, value in ends if value is not None]
    return " AND ".join(["1", *(where for where, _ in given)]), [value for _, value in given]


def _one_of(column: str, wanted: Names) -> Where:
    if wanted is None:
        return "1", []
    values = [wanted] if isinstance(wanted, str) else list(wanted)
    return f"{column} IN ({', '.join('?' * len(values))})", values


def _any_of(column: str, wanted: Names) -> Where:
    """Let pass lists that have one of the names."""
    where, values = _one_of("value", wanted)
    return (f"EXISTS (SELECT 1 FROM json_each({column}) WHERE {where})", values) if wanted is not None else ("1", [])
