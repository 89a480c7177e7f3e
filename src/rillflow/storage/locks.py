"""A lock that is a file: one holder at a time on this machine, and the operating system lets go of it when one dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rillflow.storage.files import disk_errors

_LOOK = 0.05


class LockHeld(Exception):
    """Another process has not let go of the lock in time. Callers say what that means."""


@contextmanager
def locked(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock `path`; `wait` seconds are left to who holds it now, then LockHeld."""
    with disk_errors(path):
        file = open(path, "w")  # noqa: SIM115
    with file:
        deadline = time.monotonic() + wait
        while not _lock(file):
            if time.monotonic() >= deadline:
                raise LockHeld(path)
            time.sleep(_LOOK)
        yield


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock `path` now."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
