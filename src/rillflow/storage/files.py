"""Atomic files and locks.

A reader of an atomic file sees the old content or the new one, never a mixture, whatever is killed when. A lock is a
file: one process of this machine holds it at a time, and the operating system releases it when that process dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rillflow.errors import CorruptData, DiskFull, StorageError

_HASH_BLOCK = 1 << 20


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a disk into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left while writing {path}",
                "free some space (old run folders, old weights) and run `rillflow resume RUN`: nothing that "
                "was acknowledged is lost",
            ) from error
        raise StorageError(f"cannot write {path}: {error}", "check that the folder exists and is writable") from error


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new file in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Durable and all-or-nothing; the temporary file is removed when the write fails. A `private` file can be read by
    its owner alone, at every moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            if private:
                temporary.unlink(missing_ok=True)  # one that a crash left may have other rights
            with open(temporary, "wb", opener=_open_private if private else None) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True).encode() + b"\n", private=private)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptData(f"{path} is not valid JSON: {error}", "restore it from a copy or remove it") from error


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- locks

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
