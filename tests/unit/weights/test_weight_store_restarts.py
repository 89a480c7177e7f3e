"""A store that writes deltas goes on after restarts, rewinds and damage, and reads folders of earlier versions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from delta_stores import DELTA, WHOLE, files, filled, opened, same, weights

from rillflow.errors import CorruptData, WeightsError
from rillflow.weights import FolderStore
from rillflow.weights.manifest import check_signature, key_of, route

# ---------------------------------------------------------------- restarts


def test_a_restart_reads_its_base_back(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    store = opened(tmp_path)
    assert not store.mend(weights(2), 2)
    assert store.rewind(2) == []
    store.publish(weights(3), 3, 2)
    assert files(tmp_path, 3) == DELTA
    assert same(FolderStore(tmp_path).pull(3), weights(3))


def test_without_a_base_the_next_version_is_whole(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    store = opened(tmp_path)
    store.publish(weights(3), 3, 2)
    assert files(tmp_path, 3) == WHOLE


def test_after_a_rewind_deltas_begin_at_the_new_head(tmp_path: Path) -> None:
    store = filled(tmp_path, 6)
    store.mend(weights(2), 2)
    assert store.rewind(2) == [3, 4, 5]
    store.publish(weights(9), 6, 2)
    assert store.line().entries[6].delta_of == 2
    assert same(store.pull(6), weights(9))
    assert same(store.pull(5), weights(5)), "orphans can be pulled while they are there"


@pytest.mark.parametrize("change", ["flip", "cut", "remove", "folder", "manifest"])
@pytest.mark.parametrize("link", [0, 1, 2, 3])
def test_a_damaged_link_is_noticed_and_mended(tmp_path: Path, link: int, change: str) -> None:
    filled(tmp_path, 4, every=10)
    folder = tmp_path / f"v{link:08d}"
    path = folder / ("manifest.json" if change == "manifest" else next(iter(files(tmp_path, link))))
    if change == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif change == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif change == "folder":
        folder.rename(tmp_path / "gone")
    else:
        path.unlink()
    store = opened(tmp_path, every=10)
    with pytest.raises((CorruptData, WeightsError)):
        store.pull(3)
    assert store.mend(weights(3), 3)
    assert same(FolderStore(tmp_path).pull(3), weights(3))
    assert store.line().entries[3] == store.manifest(3).entry
    assert store.line().entries[3].full_bytes
    assert not store.mend(weights(3), 3)
    store.rewind(3)
    store.publish(weights(4), 4, 3)
    assert files(tmp_path, 4) == DELTA
    assert same(FolderStore(tmp_path).pull(4), weights(4))


def test_a_kill_while_mending_leaves_no_line_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 4, every=10)
    (tmp_path / "v00000002" / "delta.rfd").unlink()
    store = opened(tmp_path, every=10)

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "_move", die)
        with pytest.raises(KeyboardInterrupt):
            store.mend(weights(3), 3)
    store = opened(tmp_path, every=10)
    assert not store.mend(weights(3), 3)
    store.rewind(3)
    assert store.line().entries[3] == store.manifest(3).entry
    assert route(store.line().entries, None, 3).snapshot == 3


def test_a_delta_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 4, every=10)
    (tmp_path / "v00000002").rename(tmp_path / "two")
    (tmp_path / "v00000003").rename(tmp_path / "v00000002")
    manifest = json.loads((tmp_path / "v00000002" / "manifest.json").read_text())
    manifest |= {"version": 2, "delta_of": 1}
    (tmp_path / "v00000002" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptData):
        FolderStore(tmp_path).pull(2)


@pytest.mark.parametrize(
    "lie", [{"delta_of": 3}, {"delta_of": 7}, {"delta_of": None}, {"fingerprints": {"norm": "0" * 16}}]
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: dict[str, object]) -> None:
    store = filled(tmp_path, 4, every=10)
    path = tmp_path / "v00000003" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | lie))
    with pytest.raises(CorruptData):
        store.pull(3)


# ---------------------------------------------------------------- old folders and keys


def test_a_folder_of_before_there_were_deltas(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for version in range(2):
        store.publish(weights(version), version, store.head())
        path = tmp_path / f"v{version:08d}" / "manifest.json"
        old = json.loads(path.read_text())
        path.write_text(json.dumps({k: old[k] for k in old if k not in ("delta_of", "fingerprints", "signature")}))
    (tmp_path / "head.json").write_text(json.dumps({"head": 1, "orphaned": []}))
    store = opened(tmp_path, key=key_of("token"))
    assert {version: bool(entry.full_bytes) for version, entry in store.line().entries.items()} == {0: True, 1: True}
    assert same(store.pull(1), weights(1))
    assert not store.mend(weights(1), 1)
    store.rewind(1)
    check_signature(store.line(), key_of("token"), "the line")
    for version in range(2):
        check_signature(store.manifest(version), key_of("token"), "a version")
    store.publish(weights(2), 2, 1)
    assert files(tmp_path, 2) == DELTA
    assert same(FolderStore(tmp_path).pull(2), weights(2))


def test_what_is_written_with_a_key_is_signed(tmp_path: Path) -> None:
    key = key_of("token")
    store = opened(tmp_path, key=key)
    for version in range(3):
        store.publish(weights(version), version, store.head())
        check_signature(store.line(), key, "the line")
        check_signature(store.manifest(version), key, "a version")
    store.prune(1)
    check_signature(FolderStore(tmp_path).line(), key, "the line")
    with pytest.raises(CorruptData):
        check_signature(store.line(), key_of("another"), "the line")
