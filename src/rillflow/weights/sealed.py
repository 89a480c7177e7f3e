"""Sealed folders: files and a manifest of their hashes that appear together, whole, by one rename.

Invariants: a sealed folder is never changed after the rename; what a crash or a full disk leaves behind has a name
that starts with a dot, so no reader takes it for a folder; a reader gets the bytes that were written or CorruptData.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rillflow.errors import CorruptData, StorageError
from rillflow.storage import disk_errors, fsync_folder

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FileFacts(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What every manifest says; users of sealed folders add their own facts in a subclass."""

    files: dict[str, FileFacts]


M = TypeVar("M", bound=Manifest)


class AlreadySealed(StorageError):
    """The folder exists: what is sealed is never written again."""


def seal(target: Path, files: Iterable[tuple[str, bytes]], facts: Mapping[str, Any]) -> None:
    """Write `files` and a manifest with `facts` so that `target` appears at once or not at all.

    AlreadySealed when `target` is there; DiskFull when the disk is, with nothing left behind.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}{_TEMPORARY}")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fill(temporary, files, facts)
            _rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_folder(target.parent)


def _fill(folder: Path, files: Iterable[tuple[str, bytes]], facts: Mapping[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written: dict[str, FileFacts] = {}
    for name, data in files:
        _write(folder / name, data)
        written[name] = FileFacts(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    manifest = msgspec.json.encode({**facts, "files": written})
    _write(folder / MANIFEST, msgspec.json.format(manifest, indent=2) + b"\n")
    fsync_folder(folder)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _rename(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise AlreadySealed(f"{target} exists already", "sealed folders are never overwritten") from error
        raise


def read_manifest(folder: Path, kind: type[M]) -> M:
    """The manifest, validated; CorruptData when it is missing, torn or not of this kind."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptData(f"{folder} has no valid manifest: {error}", "the folder is damaged") from error


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The file's bytes, whose size and hash are those of the manifest."""
    facts = manifest.files.get(name)
    # A manifest is data: it must not make a reader open anything outside its folder.
    if facts is None or not _FILE_NAME.fullmatch(name) or (folder / name).is_symlink():
        raise CorruptData(f"{folder} does not hold a file {name!r}", "the manifest is damaged")
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise CorruptData(f"{folder / name} cannot be read: {error}", "the folder is damaged") from error
    if len(data) != facts.size:
        raise CorruptData(f"{folder / name} has {len(data)} bytes instead of {facts.size}", "it was cut or changed")
    if hashlib.sha256(data).hexdigest() != facts.sha256:
        raise CorruptData(f"{folder / name} does not match its hash", "it was changed after it was written")
    return data


def remove(folder: Path) -> None:
    """Take a sealed folder away; readers see it whole or not at all."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}{_TEMPORARY}")
    with disk_errors(folder):
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Clear what killed writers left. Only the one writer of a folder may call this."""
    for path in parent.glob(f".*{_TEMPORARY}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
