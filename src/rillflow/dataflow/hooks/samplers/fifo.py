"""First admitted, first served."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.contracts import ReadyGroup


class Fifo:
    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        return [group.id for group in sorted(ready, key=lambda group: group.order)[:want]]
