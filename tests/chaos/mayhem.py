"""Faults for the processes of a real run, one after the other, drawn by a seed.

Every kind of process meets every fault once, in any order, before one comes again; then a victim is drawn of its kind.

A fault is kill -9, a freeze of some seconds (SIGSTOP, then SIGCONT) or a cut of all of the victim's connections, in
which both ends see them reset. What was done is written down, so that a failure can be told and repeated.
"""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from commands import all_processes_of
from cutting import can_cut, cut

KINDS = ("dataflow", "unit", "rollout", "engine", "trainer")
LONGEST_FREEZE = 8.0


@dataclass
class Mayhem:
    """Strikes at the processes of one run folder."""

    folder: Path
    seed: int
    every: float = 5.0
    told: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    _next: list[tuple[str, str]] = field(default_factory=list)
    _frozen: list[tuple[float, int, psutil.Process]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._possible = ("kill", "freeze", "cut") if can_cut() else ("kill", "freeze")
        self._began = time.monotonic()

    def run(self, seconds: float, over: Callable[[], object]) -> None:
        """Strike every `every` seconds, for `seconds` or until the run ends; nothing stays frozen."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        try:
            while time.monotonic() < end and not over():
                self._thaw(time.monotonic())
                if time.monotonic() >= due:
                    self.strike()
                    due += self.every
                time.sleep(0.05)
        finally:
            self._thaw(float("inf"))

    def strike(self) -> None:
        """Inject one fault; a victim that has ended meanwhile is ignored."""
        if not self._next:
            self._next = [(kind, fault) for kind in KINDS for fault in self._possible]
            self._random.shuffle(self._next)
        kind, fault = self._next.pop()
        there = [process for role, process in all_processes_of(self.folder) if role == kind]
        if not there:
            return
        victim = self._random.choice(sorted(there, key=lambda process: process.info["cmdline"]))
        with suppress(psutil.NoSuchProcess):
            name = victim.info["cmdline"][-1] if kind != "dataflow" else ""
            detail = self._do(fault, victim)
            self.faults[fault] += 1
            self.kinds[kind] += 1
            self.told.append(f"{time.monotonic() - self._began:6.1f} s: {fault} {kind} {name} ({victim.pid}){detail}")

    def _do(self, fault: str, victim: psutil.Process) -> str:
        match fault:
            case "kill":
                victim.kill()
                return ""
            case "freeze":
                seconds = self._random.uniform(1.0, LONGEST_FREEZE)
                victim.send_signal(signal.SIGSTOP)
                heapq.heappush(self._frozen, (time.monotonic() + seconds, victim.pid, victim))
                return f" for {seconds:.1f} s"
            case _:
                return f", {cut(victim)} connections"

    def _thaw(self, now: float) -> None:
        while self._frozen and self._frozen[0][0] <= now:
            _, _, victim = heapq.heappop(self._frozen)
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
