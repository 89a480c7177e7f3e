"""The groups that would pass the staleness bound first: oldest version first, then order of admission."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.contracts import ReadyGroup


class EarliestDeadline:
    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        by_deadline = sorted(ready, key=lambda group: (group.oldest, group.order))
        return [group.id for group in by_deadline[:want]]
