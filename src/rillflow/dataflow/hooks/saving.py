"""What the hooks have learnt, as rows of (hook, key, JSON), and back.

`changes` gives what differs from the rows given before; written in the transaction that the hooks' decisions belong
to, the rows always hold what the hooks knew when it was committed. A hook that works in a thread tells its state there,
after each call (`take`), so a slow `state` delays nothing else. `restore` makes the hooks what the rows say, whatever
they have learnt since: after a restart, and after a transaction was taken back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Set
from typing import Any, Protocol, cast, runtime_checkable

from rillflow.contracts import Stateful
from rillflow.errors import RunError

log = logging.getLogger(__name__)

WHOLE = ""  # the key of a state that is saved in one piece
_encode = json.JSONEncoder(separators=(",", ":")).encode


@runtime_checkable
class Incremental(Protocol):
    """A stateful hook that tells which keys of its state changed since it was asked last; None: the key is gone."""

    def changes(self) -> dict[str, Any]: ...


class SavedStates:
    """The stateful ones among the hooks of a run, each under a name of its own."""

    def __init__(self, hooks: Iterable[tuple[str, object]]) -> None:
        self._hooks = {name: cast(Stateful, hook) for name, hook in _distinct(hooks) if _is_stateful(hook)}
        self._initial = {name: _text_of(name, hook) for name, hook in self._hooks.items()}
        self._saved = dict(self._initial)
        self._unsaved: set[str] = set()  # hooks whose state could not be saved: reported once, not at every commit
        self._taken: dict[tuple[str, str], str] = {}  # rows that `take` has read and `changes` has not given yet
        self._lock = threading.Lock()  # of `_taken`

    def changes(self, in_threads: Set[int] = frozenset()) -> list[tuple[str, str, str]]:
        """The rows to be written over those of the same hook and key. They count as saved from now on. Hooks whose ids
        are `in_threads` are not asked: `take` has read their state."""
        with self._lock:
            taken, self._taken = self._taken, {}
        found = [(name, key, text) for (name, key), text in taken.items()]
        for name, hook in self._hooks.items():
            if id(hook) not in in_threads:
                found += self._asked(name, hook)
        return found

    def take(self, hook: object) -> None:
        """Read the state of a hook for the next `changes`. Runs in the thread in which the hook works."""
        rows = [row for name, one in self._hooks.items() if one is hook for row in self._asked(name, one)]
        with self._lock:
            self._taken |= {(name, key): text for name, key, text in rows}

    def _asked(self, name: str, hook: Stateful) -> list[tuple[str, str, str]]:
        try:
            return self._changes_of(name, hook)
        except Exception:
            self._complain(name)
            return []

    def _complain(self, name: str) -> None:
        if name not in self._unsaved:
            log.exception("the state of %s could not be told: the one saved before stays", name)
        self._unsaved.add(name)

    def _changes_of(self, name: str, hook: Stateful) -> list[tuple[str, str, str]]:
        if isinstance(hook, Incremental):
            return list(self._keyed(name, hook.changes()))
        text = _encode(hook.state())
        self._unsaved.discard(name)
        if text == self._saved[name]:
            return []
        self._saved[name] = text
        return [(name, WHOLE, text)]

    def _keyed(self, name: str, changes: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        """A value that is not JSON does not affect the others; it is reported only once."""
        for key, value in changes.items():
            try:
                yield name, key, _encode(value)
            except Exception:
                self._complain(name)

    def restore(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Replaces all state; a hook without rows is again what it was when it was made."""
        with self._lock:
            self._taken = {}
        found: dict[str, dict[str, str]] = {}
        for name, key, text in rows:
            found.setdefault(name, {})[key] = text
        failed: RunError | None = None
        for name, hook in self._hooks.items():
            try:
                self._restore(name, hook, found.pop(name, {}))
            except Exception as error:  # the others still get theirs
                failed = RunError(
                    f"the state of {name} cannot be restored: {type(error).__name__}: {error}",
                    "fix its `restore`, or take the hook out of the recipe",
                )
                failed.__cause__ = error
        if failed is not None:
            raise failed

    def _restore(self, name: str, hook: Stateful, rows: dict[str, str]) -> None:
        initial = self._initial[name]
        if not rows:
            self._saved[name] = initial
            if initial is not None and (isinstance(hook, Incremental) or _encode(hook.state()) != initial):
                hook.restore(json.loads(initial))
        elif isinstance(hook, Incremental):
            values = json.loads(f"[{','.join(rows.values())}]")  # all at once: there may be a million
            hook.restore({key: value for key, value in zip(rows, values, strict=True) if value is not None})
        else:
            self._saved[name] = rows[WHOLE]
            hook.restore(json.loads(rows[WHOLE]))


def _distinct(hooks: Iterable[tuple[str, object]]) -> Iterable[tuple[str, object]]:
    """The second hook of a name gets `#2` behind it, and so on."""
    seen: dict[str, int] = {}
    for name, hook in hooks:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}", hook


def _is_stateful(hook: object) -> bool:
    return all(callable(getattr(hook, method, None)) for method in ("state", "restore"))


def _text_of(name: str, hook: Stateful) -> str | None:
    try:
        return _encode(hook.state())
    except Exception:
        log.exception("the state of %s could not be told at the start", name)
        return None
