"""Errors of user code: where they were raised, and each distinct traceback once in the node's log.

Two errors are the same where they are of one type and come from the same lines; what they say may differ.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections import Counter
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MOST = 256  # distinct tracebacks of a node; those beyond are logged without
_LONGEST = 20_000

_Lines = tuple[tuple[str, int], ...]


class Tracebacks:
    """Those that one node has logged, and how often each was seen."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, _Lines]] = Counter()

    def told(self, error: BaseException | None) -> str:
        """Return what the log says of an error beside its message: its traceback the first time, then a count.

        It is empty for an error that a message explains: one that our own code has raised, and no line of the user's.
        """
        if error is None or (type(error).__module__.startswith("rillflow.") and not place_of(error)):
            return ""
        key = (type(error).__qualname__, _lines(error))
        if key not in self._seen and len(self._seen) >= _MOST:
            return ""
        self._seen[key] += 1
        if self._seen[key] == 1:
            return f"\n{trace_of(error)}"
        return f" ({self._seen[key]} times so far; the traceback of the first is above)"


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code that an error came through, as `play.py:12 in play`; empty without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if _is_users(code.co_filename):
            return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return ""


def trace_of(error: BaseException) -> str:
    """Return the end of an error's traceback, from the first line of user code on where it has any."""
    told = traceback.TracebackException.from_exception(error)
    first = next((n for n, frame in enumerate(told.stack) if _is_users(frame.filename)), 0)
    del told.stack[:first]
    return "".join(told.format())[-_LONGEST:].rstrip()


def _lines(error: BaseException) -> _Lines:
    return tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def _is_users(file: str) -> bool:
    """Whether a file is neither ours nor of a library; code without a file (`<string>`) is not the user's, either."""
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<"))
