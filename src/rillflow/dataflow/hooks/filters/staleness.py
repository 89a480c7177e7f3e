"""Drop groups that are old already when they are complete: a stricter bound than the one at which they expire."""

from __future__ import annotations

from rillflow.config.base import NonNegative
from rillflow.contracts import Group
from rillflow.dataflow.hooks.options import options


class Staleness:
    """Keeps a group whose oldest trained token is at most `most` versions behind."""

    @options
    def __init__(self, *, most: NonNegative) -> None:
        self._most = most

    def keep(self, group: Group) -> bool | str:
        return "stale" if group.staleness > self._most else True
