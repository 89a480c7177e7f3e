"""Reads the trajectories that a run has kept, while it runs and afterwards.

A reader holds nothing open between two calls, so it may be used from any thread and follows a live run. It never
writes; a folder on a read-only disk can be read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rillflow.errors import DataError
from rillflow.storage.trajectories.format import FILE, Trajectory, TrajectoryInfo
from rillflow.storage.trajectories.store import COLUMNS, LISTS, of_row, quoted, read_one, store_error

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
        """Return the rows of a query; `nothing` where the run has kept no trajectory yet."""
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
