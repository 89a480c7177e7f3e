"""Compiled loops. The first call of one compiles it (seconds); the machine code is kept beside the source.

numba checks only the file of a function for changes, not those of the functions compiled into it, so here the kept
code is valid only for this very state of all files of its folder, of the one above it and of this one. Nothing is kept
where nothing can be written. One process of a machine compiles a function; the others wait for it and load the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from rillflow.errors import StorageError
from rillflow.storage.locks import LockHeld, locked

F = TypeVar("F", bound=Callable[..., Any])
_PATIENCE = 120.0  # seconds to wait for another process; then this one compiles the function too
_LOOSE = {"contract", "reassoc", "nsz", "arcp"}


@cache
def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    places = (Path(__file__).parent, folder.parent, folder)
    files = [path for place in places for path in sorted(place.glob("*.py"))]
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


class _Kept(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        state = _state(Path(function.__code__.co_filename).parent)
        base = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self._cache_path, base, state)  # type: ignore[no-untyped-call]
        self._lock_file = Path(self._cache_path) / f"{base}.lock"
        self._held: ExitStack | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kept code, or None with the lock held: the caller compiles the function and saves it."""
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is not None or self._held is not None:
            return found
        self._held = ExitStack()
        with suppress(LockHeld, StorageError):
            self._held.enter_context(locked(self._lock_file, _PATIENCE))
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is not None:
            self._let_go()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def compiled(function: F) -> F:
    """The function in machine code, for the types it is called with; other threads run while it does."""
    # Said, or what a loose function calls first would be loose too.
    return _kept(function, numba.njit(nogil=True, fastmath=False)(function))


def loosely(function: F) -> F:
    """The same for sums of floats, which may be in any order and whose products need not be rounded: so they are
    computed several at once. What is not a number stays so."""
    return _kept(function, numba.njit(nogil=True, fastmath=_LOOSE, error_model="numpy")(function))


def _kept(function: F, made: Any) -> F:
    with suppress(RuntimeError):  # no folder can be written
        made._cache = _Kept(function)
    return cast(F, made)


def inlined(function: F) -> F:
    """The same for a small part of compiled functions: it becomes a piece of them, for a call has its price."""
    return cast(F, numba.njit(nogil=True, fastmath={"contract"}, forceinline=True)(function))
