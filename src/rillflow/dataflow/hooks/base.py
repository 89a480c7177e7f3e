"""What hooks are made of: options that are checked by their types, and state that is saved with the ledger.

State is kept as rows of (hook, key, JSON). `SavedStates.changes` gives what differs from the rows given before; written
in the transaction that the hooks' decisions belong to, the rows always hold what the hooks knew when it was committed.
A hook that works in a thread reads its state there, after each call (`SavedStates.take`), so a slow `state` delays
nothing else. `SavedStates.restore` makes the hooks what the rows say, whatever they have learnt since: after a restart,
and after a transaction was taken back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Set
from typing import Annotated, Any, Protocol, cast, runtime_checkable

from pydantic import ConfigDict, Field, validate_call

from rillflow.contracts import Stateful
from rillflow.errors import RunError

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0)]

# For a hook's constructor: its keyword arguments are the hook's options. A number may be written as text, because YAML
# takes `1e-4` for text; numbers that are not finite are refused.
options = validate_call(config=ConfigDict(allow_inf_nan=False))


class KeyedState:
    """Base of hooks that learn something of every prompt. Only values that changed since the last save are written.

    Values are JSON and never changed in place: `put` a new one instead. None stands for the default, which the hook
    assumes of a prompt that it knows nothing of; it is saved as `null`, and such a row may be deleted.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed: dict[str, None] = {}  # in the order of change, so that what is saved does not depend on hashes

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def put(self, key: str, value: Any) -> None:
        if self._values.get(key) == value:
            return
        self._changed[key] = None
        if value is None:
            del self._values[key]
        else:
            self._values[key] = value

    def state(self) -> dict[str, Any]:
        return dict(self._values)

    def restore(self, state: dict[str, Any]) -> None:
        self._values = dict(state)
        self._changed = {}

    def changes(self) -> dict[str, Any]:
        """Return the values of the keys that changed since the last call; None for a key that was removed."""
        changed, self._changed = self._changed, {}
        return {key: self._values.get(key) for key in changed}


def of_prompt(prompt_id: str) -> str:
    """Return the key of a prompt's value. It differs from every key that does not belong to a prompt."""
    return f"@{prompt_id}"


# ---------------------------------------------------------------- saving

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
        self._lock = threading.Lock()  # guards `_taken`

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
