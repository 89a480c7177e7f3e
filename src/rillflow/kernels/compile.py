"""Compiling the kernels of the CPU: numba compiles them and keeps the machine code on disk for the next process.

numba keeps the machine code of a function as long as the file of that function does not change. The code of other
functions that it calls is part of it, so the folder's name has a hash of all sources of this package: code of other
sources is never used. The folder is inside `__pycache__`, in the user's cache where that cannot be written, or in
`NUMBA_CACHE_DIR` if that is set. If nothing can be written, each process compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])
_config: Any = numba.config  # its attributes are made when numba is imported
# Sums may be taken in any order and products need not be rounded, so that several are computed at once. NaN stays NaN.
_FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
_setting = threading.RLock()  # numba reads its folder from one variable, and threads import kernels at the same time
os.register_at_fork(before=_setting.acquire, after_in_parent=_setting.release, after_in_child=_setting.release)
_PATIENCE, _LOOK = 120.0, 0.05  # seconds that a process waits for another one that compiles; and between two looks


def compiled(function: F) -> F:
    """Return the function in machine code, for the types that it is called with. It releases the interpreter lock."""
    # fastmath is named because a function without it takes over that of its first caller.
    return _kept(function, fastmath=False)


def fastmath(function: F) -> F:
    """Return the same for sums of floats, which may be added up in any order."""
    return _kept(function, fastmath=_FASTMATH, error_model="numpy")


def inlined(function: F) -> F:
    """Return the same for a small part of compiled functions: its code becomes a part of theirs."""
    return cast(F, numba.njit(nogil=True, fastmath={"contract"}, forceinline=True)(function))


def _kept(function: F, **options: Any) -> F:
    folder = _folder()
    if folder is None:
        return cast(F, numba.njit(nogil=True, **options)(function))
    with _setting:
        before, _config.CACHE_DIR = _config.CACHE_DIR, str(folder)
        try:
            return cast(F, numba.njit(nogil=True, cache=True, **options)(function))
        finally:
            _config.CACHE_DIR = before


@contextmanager
def one_compiles() -> Iterator[None]:
    """Hold a lock of this machine while kernels are compiled, so that other processes wait and load the result.

    A process that has waited too long goes on without the lock and compiles, too.
    """
    folder = _folder()
    if folder is None:
        yield
        return
    with open(folder / "lock", "w") as file:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(file.fileno()) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        yield


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _folder() -> Path | None:
    """Return where machine code of these sources is kept, or None if nothing can be written."""
    own, users = Path(__file__).parent / "__pycache__", Path.home() / ".cache" / "rillflow"
    places = [Path(_config.CACHE_DIR)] if _config.CACHE_DIR else [own, users]
    for place in places:
        folder = place / f"kernels-{digest(Path(__file__).parent)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def digest(folder: Path) -> str:
    """Return a hash of all Python sources in a folder and those below it."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
