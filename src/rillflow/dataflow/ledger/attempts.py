"""Attempts: every lease of a task that was ever given.

The row of a task says which attempt holds it or has done it. An attempt that ends otherwise gets a row of its own,
before the row of its task goes on without it. The view `attempts` has all of them.

The only writer of ended_attempts.
"""

from __future__ import annotations

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.tables import TASK, Attempt, Task

_LONGEST_PLACE = 9  # digits of a task's place in its group
_TASK = f"SELECT {TASK}, t.digest FROM tasks t JOIN groups g ON g.id = t.grp WHERE t.grp = ? AND t.place = ?"


class Attempts(Part):
    def __init__(self, base: Base, playing: Playing) -> None:
        super().__init__(base)
        self._playing = playing

    def find(self, name: str) -> Attempt | None:
        """Return the attempt, whether or not it holds its task; None for an unknown attempt."""
        held = self._playing.held(name)
        if held is not None:
            return Attempt(name, held, held.node or "")
        group, _, place = name.rpartition("-")[0].rpartition(".")
        if not place.isdecimal() or len(place) > _LONGEST_PLACE:
            return None
        row = self._db.one(_TASK, (group, int(place)))
        if row is None:
            return None
        task = Task(*row[:-1])
        if task.state == "done" and task.attempt == name:
            return Attempt(name, task, task.node or "", "done", digest=row[-1])
        ended = self._db.one("SELECT node, state, cause, digest FROM ended_attempts WHERE id = ?", (name,))
        return None if ended is None else Attempt(name, task, *ended)

    def end(self, task: Task, state: str, cause: str, digest: str | None = None) -> None:
        """Record the end of the attempt that holds a task; `digest` identifies the completion that ended it."""
        self._db.run(
            "INSERT INTO ended_attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(task.attempt, task.grp, task.place, task.node, state, cause, digest, task.leased_at),
                self._clock.now(),
            ),
        )

    def end_done(self, group: str, place: int, state: str, cause: str, at: float | None = None) -> bool:
        """Record that the attempt which has done a task is void, at this time or when it was done; return False if the
        task is not done."""
        return bool(
            self._db.run(
                "INSERT INTO ended_attempts SELECT attempt, grp, place, node, ?, ?, digest, leased_at, "
                "ifnull(?, ended_at) FROM tasks WHERE grp = ? AND place = ? AND state = 'done'",
                (state, cause, at, group, place),
            )
        )
