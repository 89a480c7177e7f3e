"""A bound on concurrent requests; those past it get a 429."""

from __future__ import annotations

from rillflow.errors import QueueFull


class Gate:
    """Lets `most` in. Each that was let in leaves exactly once."""

    def __init__(self, most: int, what: str) -> None:
        self.most = most
        self.at_work = 0
        self._what = what

    def enter(self) -> bool:
        if self.at_work >= self.most:
            return False
        self.at_work += 1
        return True

    def leave(self) -> None:
        self.at_work -= 1

    def refusal(self) -> QueueFull:
        return QueueFull(f"{self.most} {self._what} are at work", "come back when some have ended")
