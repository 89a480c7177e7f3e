"""Which neighbouring rows of a decode step are read together: each stretch of rows up to its own longest.

One call over all rows reads every row as far as the longest goes. With long-tailed lengths most of that is masked; a
call of its own for a row costs a dispatch. A stretch ends where the columns saved are worth more than a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Stretch(NamedTuple):
    """Neighbouring rows, none of which has more than `extent` columns."""

    rows: slice
    extent: int


def stretches(extents: Iterable[int], call: int) -> list[Stretch]:
    """In order, every row in exactly one; `call` is how many columns could be read in the time that a call takes.

    One walk over the rows. Within a stretch, the rows after its longest are its tail: as soon as it would pay, the tail
    becomes a stretch of its own.
    """
    made: list[Stretch] = []
    first = tail = row = 0
    longest = longest_of_tail = 0
    for row, extent in enumerate(extents):
        if extent > longest:
            if (row - first) * (extent - longest) > call:
                made.append(Stretch(slice(first, row), longest))
                first = row
            longest, tail, longest_of_tail = extent, row + 1, 0
            continue
        longest_of_tail = max(longest_of_tail, extent)
        if (row + 1 - tail) * (longest - longest_of_tail) > call:
            made.append(Stretch(slice(first, tail), longest))
            first, longest, tail, longest_of_tail = tail, longest_of_tail, row + 1, 0
    if longest:
        made.append(Stretch(slice(first, row + 1), longest))
    return made
