"""Processor time of a command and of all that it starts, by role, while it runs.

Beside other work on the machine wall time says little of a side; the core seconds that it took say more.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_EVERY = 0.25
_TICK = os.sysconf("SC_CLK_TCK")


class Metered:
    """Runs a command; afterwards `between` says what it took. A process that has ended keeps what it had."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self._process = subprocess.Popen(command, **options)
        self._taken: dict[int, tuple[str, float]] = {}
        self._looks: list[tuple[float, dict[str, float]]] = [(time.time(), {})]
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._watch.join()
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60.0)

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Core seconds of each role between two moments, as `time.time` tells them."""
        moments = [moment for moment, _ in self._looks]
        first, last = (self._looks[min(bisect_left(moments, at), len(moments) - 1)][1] for at in (begin, end))
        return {role: taken - first.get(role, 0.0) for role, taken in last.items()}

    def _look_on(self) -> None:
        while not self._over.wait(_EVERY):
            for pid in _tree(self._process.pid):
                seconds = _seconds(pid)
                if seconds is not None:
                    self._taken[pid] = (_role(pid) or self._taken.get(pid, ("", 0.0))[0], seconds)
            roles: dict[str, float] = {}
            for role, seconds in self._taken.values():
                roles[role] = roles.get(role, 0.0) + seconds
            self._looks.append((time.time(), roles))


def _tree(root: int) -> Iterator[int]:
    yield root
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from _tree(int(child))


def _seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICK


def _role(pid: int) -> str:
    """`rillflow trainer …` is a trainer; of another module, its name."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ""
    if "-m" not in words[:-1]:
        return ""
    module, *rest = [*words[words.index("-m") + 1 :], ""]
    return rest[0] if module == "rillflow" else module.rpartition(".")[2]
