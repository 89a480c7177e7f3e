from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rillflow.errors import CorruptData, DiskFull, StorageError
from rillflow.storage import file_hash, read_json, write_atomic, write_json


def test_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["value.json"]


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "value"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="resume"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["value"]


def test_missing_folder_is_clear(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_atomic(tmp_path / "absent" / "file", b"")


def test_broken_json_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CorruptData):
        read_json(tmp_path / "x.json")


def test_hash_of_known_content(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_hash(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
