"""Errors of user code, wherever it runs: each distinct one once, with its traceback and how often it was seen."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.dataflow.part import Part
from rillflow.types import UserError

_MOST = 256  # distinct errors of a run; those beyond are counted as one
_SHOWN = 8  # in a status
_LONGEST, _LONGEST_TRACE = 500, 4000
_OTHERS = UserError(kind="others", where="", error=f"beyond the first {_MOST} distinct errors")
_ADD = (
    "INSERT INTO user_errors VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, place) DO UPDATE SET n = n + excluded.n, "
    "trace = CASE trace WHEN '' THEN excluded.trace ELSE trace END"
)


class UserErrors(Part):
    def add(self, errors: Sequence[UserError]) -> None:
        """Count these errors. Nodes tell of them, so they are cut to what may be kept."""
        for error in errors:
            one = error if self._has_room(error) else _OTHERS
            count = min(max(error.count, 1), 1 << 31)
            self._db.run(_ADD, (*_key(one), one.error[:_LONGEST], one.trace[-_LONGEST_TRACE:], count))

    def _has_room(self, error: UserError) -> bool:
        known = self._db.value("SELECT 1 FROM user_errors WHERE kind = ? AND place = ?", _key(error))
        return known is not None or self._db.value("SELECT count(*) FROM user_errors") < _MOST

    def shown(self) -> list[UserError]:
        """Return the most frequent ones."""
        rows = self._db.all("SELECT * FROM user_errors ORDER BY n DESC, kind, place LIMIT ?", (_SHOWN,))
        return [
            UserError(kind=row["kind"], where=row["place"], error=row["error"], trace=row["trace"], count=row["n"])
            for row in rows
        ]


def _key(error: UserError) -> tuple[str, str]:
    return error.kind[:100], error.where[:_LONGEST]
