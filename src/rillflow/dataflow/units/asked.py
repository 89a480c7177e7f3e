"""The valid requests to a unit."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.clients.directory import GET_LIMIT
from rillflow.errors import BadRequest
from rillflow.types import Row


def check_asked(rows: Sequence[Row], unit: str) -> None:
    """Rows of this unit, at places that can exist, and not too many bytes at once."""
    for row in rows:
        if row.unit != unit:
            raise BadRequest(f"this unit is {unit}, not {row.unit}", "ask the unit that the row names")
        if min(row.segment, row.offset, row.length) < 0:
            raise BadRequest(f"there is no row {row}", "use a row that a put has returned")
    if sum(row.length for row in rows) > GET_LIMIT:
        raise BadRequest(f"the rows are larger than {GET_LIMIT} bytes together", "ask for fewer rows at once")
