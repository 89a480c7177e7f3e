"""Sealed folders: files and a manifest of their hashes that appear together, whole, by one rename.

Invariants: a sealed folder is never changed after the rename; leftovers of a crash or a full disk have names that start
with a dot, so no reader uses them; a reader gets the bytes that were written or CorruptData.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rillflow.errors import CorruptData, StorageError
from rillflow.storage import disk_errors, file_hash, fsync_folder
from rillflow.types.base import json_decoder

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FileFacts(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of every manifest; users of sealed folders add their own in a subclass."""

    files: dict[str, FileFacts]


M = TypeVar("M", bound=Manifest)


class AlreadySealed(StorageError):
    """The folder exists: sealed folders are never written again."""


Content = bytes | Iterable[bytes | memoryview]


def plain(files: dict[str, FileFacts]) -> Manifest:
    """Return a manifest of files alone."""
    return Manifest(files=files)


def seal(
    target: Path, files: Iterable[tuple[str, Content]], describe: Callable[[dict[str, FileFacts]], Manifest] = plain
) -> Manifest:
    """Write `files` and the manifest that `describe` makes of them, so that `target` appears at once or not at all.

    AlreadySealed if `target` exists; DiskFull if the disk is full, with nothing left behind.
    """
    temporary = unfinished(target, str(os.getpid()))
    with cleaned(temporary, target):
        shutil.rmtree(temporary, ignore_errors=True)
        manifest = describe(fill(temporary, files))
        close(temporary, target, manifest)
    return manifest


def unfinished(target: Path, writer: str) -> Path:
    """Return the temporary folder of `target`, until all files are written."""
    return target.with_name(f".{target.name}.{writer}{_TEMPORARY}")


@contextmanager
def cleaned(temporary: Path, target: Path) -> Iterator[None]:
    """Remove the temporary folder after an error; disk errors get a hint."""
    with disk_errors(target):
        try:
            yield
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def fill(folder: Path, files: Iterable[tuple[str, Content]]) -> dict[str, FileFacts]:
    """Write files into an unsealed folder; each is durable before the next one begins."""
    folder.mkdir(parents=True, exist_ok=True)
    return {name: _write(folder / name, content) for name, content in files}


def close(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, then rename the folder, which makes it visible."""
    _write(temporary / MANIFEST, as_text(manifest))
    fsync_folder(temporary)
    _rename(temporary, target)
    fsync_folder(target.parent)


def as_text(value: msgspec.Struct) -> bytes:
    """Return readable JSON: one line for each fact, in an order that depends on the facts alone."""
    ordered = msgspec.to_builtins(value, str_keys=True, order="sorted")
    return msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n"


def _write(path: Path, content: Content) -> FileFacts:
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(sha256=digest.hexdigest(), size=size)


def _rename(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise AlreadySealed(f"{target} exists already", "sealed folders are never overwritten") from error
        raise


def read_manifest(folder: Path, kind: type[M]) -> M:
    """Read and validate the manifest; CorruptData if it is missing, torn or of another kind."""
    try:
        return json_decoder(kind).decode((folder / MANIFEST).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{folder} has no valid manifest: {error}", "the folder is damaged") from error


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Read a file and check its size and hash against the manifest."""
    facts = _facts(folder, name, manifest)
    with _readable(folder / name):
        data = (folder / name).read_bytes()
    _compare(folder / name, facts, len(data), hashlib.sha256(data).hexdigest())
    return data


def verify_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Check a file's size and hash block by block, for readers of parts of the file."""
    facts = _facts(folder, name, manifest)
    with _readable(folder / name):
        size, digest = (folder / name).stat().st_size, file_hash(folder / name)
    _compare(folder / name, facts, size, digest)


def _facts(folder: Path, name: str, manifest: Manifest) -> FileFacts:
    facts = manifest.files.get(name)
    # Manifests come from outside: a name must not make a reader open a file outside the folder.
    if facts is None or not FILE_NAME.fullmatch(name) or (folder / name).is_symlink():
        raise CorruptData(f"{folder} does not hold a file {name!r}", "the manifest is damaged")
    return facts


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptData(f"{path} cannot be read: {error}", "the folder is damaged") from error


def _compare(path: Path, facts: FileFacts, size: int, digest: str) -> None:
    if size != facts.size:
        raise CorruptData(f"{path} has {size} bytes instead of {facts.size}", "it was cut or changed")
    if digest != facts.sha256:
        raise CorruptData(f"{path} does not match its hash", "it was changed after it was written")


def remove(folder: Path) -> None:
    """Remove a sealed folder; readers see it whole or not at all."""
    gone = unfinished(folder, str(os.getpid()))
    with disk_errors(folder):
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove leftovers of killed writers. Only the folder's writer may call this."""
    for path in parent.glob(f".*{_TEMPORARY}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:  # a leftover of `write_atomic`
            with suppress(OSError):
                path.unlink()
