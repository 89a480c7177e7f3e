"""What the simulation is made of: a clock with events, servers with one queue, engines that share their time.

A server takes one job after the other, in the order in which they come; the caller learns when its job will have ended.
An engine decodes all its sequences together; how fast depends on how many there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Event = Callable[[Any], None]
_SOON = 1e-6  # of a token: the rest takes less than the clock's resolution


class Clock:
    """Events in the order of their times; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._events: list[tuple[float, int, Event, Any]] = []
        self._numbers = count()

    def at(self, time: float, event: Event, what: Any = None) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event, what))

    def run(self, until: float) -> bool:
        """Until an event sets `stopped`; False when there was nothing more to do, or the time was over, before that."""
        events, self.stopped = self._events, False
        while not self.stopped:
            if not events or events[0][0] > until:
                return False
            self.now, _, event, what = heapq.heappop(events)
            event(what)
        return True


class Server:
    """One process, or one link. `busy` are the seconds that it has worked or will have, once all has ended."""

    __slots__ = ("busy", "free")

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a job that comes now has ended."""
        self.free = (self.free if self.free > now else now) + seconds
        self.busy += seconds
        return self.free


class Engine:
    """Sequences that are decoded together. `work` counts the tokens of one of them, as if it had been there always.

    A sequence of n tokens that begins at w ends when `work` is w + n, whoever comes and goes.
    """

    __slots__ = ("_ends", "_step", "at", "decoded", "due", "tokens", "work")

    def __init__(self, step: list[float]) -> None:
        self._step = step  # seconds a token, by the number of sequences
        self._ends: list[tuple[float, int, Any]] = []
        self.at = 0.0  # `work` is that of this time
        self.work = 0.0
        self.due = float("inf")  # the time of the next check for ended sequences
        self.decoded = 0.0  # seconds in which there was a sequence
        self.tokens = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def move(self, now: float) -> None:
        """Decode until now."""
        passed = now - self.at
        if passed <= 0:
            return  # paused until later
        self.at = now
        if self._ends:
            number = len(self._ends)
            done = passed / self._step[number]
            self.work += done
            self.tokens += done * number
            self.decoded += passed

    def pause(self, now: float, seconds: float) -> None:
        self.move(now)
        self.at = max(self.at, now) + seconds

    def add(self, now: float, tokens: float, number: int, what: Any) -> None:
        self.move(now)
        heapq.heappush(self._ends, (self.work + tokens, number, what))

    def ended(self, now: float) -> list[Any]:
        """Those that have ended, which leave."""
        self.move(now)
        found = []
        while self._ends and self._ends[0][0] <= self.work + _SOON:
            found.append(heapq.heappop(self._ends)[2])
        return found

    def next_end(self) -> float:
        """Return when the next sequence ends if no other begins."""
        if not self._ends:
            return float("inf")
        return self.at + max(0.0, self._ends[0][0] - self.work) * self._step[len(self._ends)]
