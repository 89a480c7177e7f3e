"""Errors of user code: where they were raised, and each distinct traceback once in the log of a process.

Two errors are the same if they have one type and come from the same lines; their messages may differ. Texts that leave
the process have no passwords of URLs.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from rillflow.config.secrets import without_secrets
from rillflow.types import UserError

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MOST = 256  # distinct tracebacks of a process; those beyond are logged without
_LONGEST = 20_000
_REPORTED = 4_000  # characters of a traceback in the ledger: its end

_Lines = tuple[tuple[str, int], ...]


class Tracebacks:
    """Those that one process has logged, and how often each was seen."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, _Lines]] = Counter()

    def told(self, error: BaseException | None) -> str:
        """Return what the log says of an error beside its message: its traceback the first time, then a count.

        It is empty for an error that a message explains: one that our own code has raised, and no line of the user's.
        """
        if error is None or _is_explained(error):
            return ""
        key = (type(error).__qualname__, _lines(error))
        if key not in self._seen and len(self._seen) >= _MOST:
            return ""
        self._seen[key] += 1
        if self._seen[key] == 1:
            return f"\n{trace_of(error)}"
        return f" ({self._seen[key]} times so far; the traceback of the first is above)"


class UserErrors:
    """Errors of user code in one process: each for its log, and all for the run's ledger."""

    def __init__(self) -> None:
        self._tracebacks = Tracebacks()
        self._new: dict[tuple[str, str], UserError] = {}
        self._traced: set[tuple[str, str]] = set()

    def note(self, kind: str, error: BaseException | None) -> str:
        """Remember an error for the ledger; return what the log says of it beside its message: see `Tracebacks`."""
        told = self._tracebacks.told(error)
        if error is not None and told:
            key = (kind, f"{type(error).__name__} {place_of(error)}".strip())
            trace = "" if key in self._traced else trace_of(error)[-_REPORTED:]
            self._traced.add(key)
            self.add([UserError(*key, error=located(error), trace=trace)])
        return told

    def add(self, errors: Iterable[UserError]) -> None:
        """Remember errors, each with its count."""
        for one in errors:
            key = (one.kind, one.where)
            known = self._new.get(key, replace(one, count=0))
            self._new[key] = replace(one, trace=known.trace or one.trace, count=known.count + one.count)

    def take(self) -> list[UserError]:
        """Return what was noted since the last call."""
        taken, self._new = list(self._new.values()), {}
        return taken


def located(error: BaseException) -> str:
    """Return what goes to the ledger and the log of an error of user code: also where it was raised."""
    place = place_of(error)
    return f"{short(error)} ({place})" if place else short(error)


def short(error: BaseException) -> str:
    """Return what goes to the ledger and the log of an error."""
    return without_secrets(f"{type(error).__name__}: {error}")[:500]


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
    return without_secrets("".join(told.format()))[-_LONGEST:].rstrip()


def _is_explained(error: BaseException) -> bool:
    noted = bool(getattr(error, "__notes__", None))  # such as where a hook hangs
    return type(error).__module__.startswith("rillflow.") and not noted and not place_of(error)


def _lines(error: BaseException) -> _Lines:
    return tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def _is_users(file: str) -> bool:
    """Return whether a file is the user's: neither ours nor a library's, and not code without a file (`<string>`)."""
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<"))
