"""The groups that would pass the staleness bound first: the most stale first, then in order of admission."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.contracts import ReadyGroup


class EarliestDeadline:
    """Goes by staleness, not by version: groups of several policies may be in one stream, each with its own count."""

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        by_deadline = sorted(ready, key=lambda group: (-group.staleness, group.order))
        return [group.id for group in by_deadline[:want]]
