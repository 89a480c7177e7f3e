"""Files of dropped segments, kept to be written over: their blocks are allocated and their pages are in memory, so the
disk takes the same bytes faster than into a new file (1.8 times, where it was measured on a busy machine).

Old bytes are never believed: a record is bound to its segment's number, which is used once (see `records`). And no
bytes change under a reader: whoever maps a file holds a shared lock on it for as long as the mapping lives, and a file
that somebody holds is removed instead of kept. These locks are of the open file, not of the process, and have nothing
to do with the lock by which a writer owns its file. What they do not protect against: a reader on another host whose
file system does not tell this one of its locks.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_KEPT = 8  # files in a folder
_SUFFIX = ".free"
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None)  # of Linux


def hold(descriptor: int, path: Path) -> bool:
    """Lock the open file against being written over; False when it is no longer the one at `path`.

    The lock lasts until the last copy of the descriptor is closed; a mapping has one of its own.
    """
    try:
        _lock(descriptor, fcntl.F_RDLCK)
    except (BlockingIOError, PermissionError):
        return False  # it is being dropped
    except OSError:
        pass  # a file system without locks: nobody keeps a file there either
    return is_at(descriptor, path)


def keep(path: Path) -> bool:
    """Keep a file, which nobody writes into, to be written over; False when it must be removed instead."""
    if len(list(_kept(path.parent))) >= MOST_KEPT:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_nlink > 1:
            return False  # somebody's copy of the folder is made of links
        _lock(descriptor, fcntl.F_WRLCK)
        os.rename(path, path.with_suffix(_SUFFIX))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def reuse(path: Path) -> int | None:
    """Put a file that was kept in the place of the one at `path`, which the caller owns; its descriptor, owned as well.

    None when there is none. Whoever looks at `path` finds a file that is owned, the one or the other.
    """
    for kept in _kept(path.parent):
        with suppress(OSError):  # another writer was first
            descriptor = os.open(kept, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(descriptor, kept) and os.fstat(descriptor).st_nlink == 1:
                    os.rename(kept, path)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    return None


def discard(folder: Path) -> None:
    """Give the space of all kept files back."""
    for kept in _kept(folder):
        kept.unlink(missing_ok=True)


def _kept(folder: Path) -> Iterator[Path]:
    return folder.glob(f"*{_SUFFIX}")


def _lock(descriptor: int, kind: int) -> None:
    """The whole file, for all who have this open file, and without waiting."""
    if _SET_LOCK is None:
        raise OSError("no such locks on this system")
    fcntl.fcntl(descriptor, _SET_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
