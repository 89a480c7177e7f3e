"""The weight store: whole versions or none, verified, never written twice, with a line that can be rewound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rillflow.contracts import WeightStore
from rillflow.errors import CorruptData, DiskFull, WeightsError
from rillflow.weights import FolderStore, codec, folder
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import Line


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(6, 4, generator=generator)
    return {
        "embed": embed,
        "lm_head": embed,
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "turned": torch.randn(3, 2, generator=generator).t(),
        "part": embed[:2],
        "scalar": torch.tensor(3.5),
    }


def filled(folder: Path, *versions: int) -> FolderStore:
    store = FolderStore(folder)
    for version in versions:
        store.publish(tensors(version), version, store.head())
    return store


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_is_pulled_is_what_was_published(tmp_path: Path) -> None:
    store: WeightStore = filled(tmp_path / "w", 0, 1)
    assert store.head() == 1
    assert store.versions() == [0, 1]
    assert equal(store.pull(0), tensors(0))
    assert equal(store.pull(1), tensors(1))


def test_tied_tensors_are_written_once_and_tied_again(tmp_path: Path) -> None:
    pulled = filled(tmp_path, 0).pull(0)
    assert pulled["lm_head"].data_ptr() == pulled["embed"].data_ptr()
    manifest = json.loads((tmp_path / "v00000000" / "manifest.json").read_text())
    assert manifest["aliases"] == {"lm_head": "embed"}
    assert manifest["tensors"]["half"] == {"dtype": "bfloat16", "shape": [5, 3]}
    assert (manifest["version"], manifest["parent"]) == (0, None)


def test_large_versions_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SHARD_BYTES", 64)
    store = filled(tmp_path, 0)
    assert len(list((tmp_path / "v00000000").glob("model-*.safetensors"))) > 1
    assert equal(store.pull(0), tensors(0))


def test_a_tensor_in_pieces_is_written_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SHARD_BYTES", 64)
    whole = codec.unique(tensors(1))[0]
    flat = {name: tensor.contiguous().reshape(-1) for name, tensor in whole.items()}
    cut = {name: [part for part in flat[name].split(5) if part.numel()] for name in whole}
    pieces = {name: codec.Pieces(tensor.dtype, tensor.shape, cut[name]) for name, tensor in whole.items()}
    written = [{name: b"".join(data) for name, data in codec.encode(given)} for given in (whole, pieces)]
    assert written[0] == written[1]
    assert len(written[0]) > 1


def test_a_version_that_is_there_is_told_from_a_damaged_or_another(tmp_path: Path) -> None:
    store = filled(tmp_path, 0, 1)
    manifest = store.manifest(1)
    assert store.has(1, manifest.tensors, manifest.aliases, None)
    assert not store.has(1, manifest.tensors, {}, None)
    assert not store.has(2, manifest.tensors, manifest.aliases, None)
    (store.path(1) / "model.safetensors").write_bytes(b"nothing")
    assert not store.has(1, manifest.tensors, manifest.aliases, None)


def test_an_empty_store(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "none")
    assert (store.head(), store.versions(), store.highest()) == (None, [], -1)
    with pytest.raises(WeightsError, match="version 3 is not"):
        store.pull(3)


def damaged(folder: Path, name: str, change: str) -> None:
    path = folder / name
    if change == "flip":
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
    elif change == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_damaged_weights_are_refused(tmp_path: Path, change: str) -> None:
    store = filled(tmp_path, 0)
    damaged(tmp_path / "v00000000", "model.safetensors", change)
    with pytest.raises(CorruptData):
        store.pull(0)


@pytest.mark.parametrize("change", ["cut", "remove"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: str) -> None:
    store = filled(tmp_path, 0)
    damaged(tmp_path / "v00000000", "manifest.json", change)
    with pytest.raises(CorruptData):
        store.pull(0)


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 3},
        {"tensors": {}},
        {"aliases": {"x": "not there"}},
        {"files": {"../v00000001/model.safetensors": {"sha256": "0", "size": 1}}},
        {"files": {"/etc/hostname": {"sha256": "0", "size": 1}}},
        {"files": 5},
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: dict[str, object]) -> None:
    store = filled(tmp_path, 0)
    path = tmp_path / "v00000000" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | lie))
    with pytest.raises(CorruptData):
        store.pull(0)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path / "w", 0)
    weights = tmp_path / "w" / "v00000000" / "model.safetensors"
    os.rename(weights, tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptData):
        store.pull(0)


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    store = filled(tmp_path, 0, 1, 2)
    for version in (2, 1):
        with pytest.raises(WeightsError, match="never used twice"):
            store.publish(tensors(9), version, 2)
    store.rewind(0)
    store.prune(1)
    assert store.versions() == [0]
    with pytest.raises(WeightsError, match="never used twice"):
        store.publish(tensors(9), 2, 0)
    assert equal(store.pull(0), tensors(0))


def test_two_writers_of_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename decides, also when the check before it saw nothing."""
    store = filled(tmp_path, 0, 1)
    monkeypatch.setattr(store, "_check_new", lambda version, parent: None)
    with pytest.raises(WeightsError, match="exists already"):
        store.publish(tensors(9), 1, 0)
    assert equal(store.pull(1), tensors(1))
    assert not list(tmp_path.glob(".*"))


def test_a_trainer_that_was_replaced_cannot_publish(tmp_path: Path) -> None:
    store = filled(tmp_path, 0, 1, 2)
    FolderStore(tmp_path).rewind(1)
    with pytest.raises(WeightsError, match="another trainer"):
        store.publish(tensors(3), 3, 2)


def test_rewind_orphans_what_came_after(tmp_path: Path) -> None:
    store = filled(tmp_path, 0, 1, 2, 3)
    assert store.rewind(1) == [2, 3]
    assert store.rewind(1) == []
    assert (store.head(), store.highest()) == (1, 3)
    store.publish(tensors(4), 4, 1)
    line = FolderStore(tmp_path).line()
    assert (line.head, line.orphaned) == (4, {2, 3})
    assert store.rewind(1) == [4]
    with pytest.raises(WeightsError, match="orphaned"):
        store.rewind(3)
    with pytest.raises(WeightsError, match="not in"):
        store.rewind(8)
    assert store.head() == 1


def test_a_poller_sees_every_move_of_the_head(tmp_path: Path) -> None:
    reader = FolderStore(tmp_path)
    writer = FolderStore(tmp_path)
    assert reader.head() is None
    for version in range(4):
        writer.publish(tensors(version), version, writer.head())
        assert reader.head() == version
    writer.rewind(2)
    assert reader.line().orphaned == {3}


def test_threads_that_look_at_once_do_not_see_an_old_head_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow one that has read the old line ends in the middle of what a quick one does."""
    store = FolderStore(tmp_path)
    store.publish({"w": torch.zeros(1)}, 0, None)
    has_read, may_go_on = threading.Event(), threading.Event()
    parse = folder.parse_line

    def slowly(data: bytes, key: bytes, what: str) -> Line:
        if threading.current_thread() is slow:
            has_read.set()
            may_go_on.wait(60)
        return parse(data, key, what)

    class Watched(Folder):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if has_read.is_set() and threading.current_thread() is not slow:
                may_go_on.set()
                slow.join(60)

    reader = Watched(tmp_path)
    slow = threading.Thread(target=reader.line)
    monkeypatch.setattr(folder, "parse_line", slowly)
    slow.start()
    assert has_read.wait(60)
    store.publish({"w": torch.ones(1)}, 1, 0)
    assert reader.line().head == 1
    assert reader.line().head == 1


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    store = filled(tmp_path, 0, 1)
    (tmp_path / ".head.json.123.tmp").write_bytes(b"half a li")
    (tmp_path / ".v00000002.123.tmp").mkdir()
    (tmp_path / ".v00000002.123.tmp" / "model.safetensors").write_bytes(b"half a file")
    store.rewind(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.json", "v00000000", "v00000001"]


def test_a_broken_head_is_an_error_not_a_guess(tmp_path: Path) -> None:
    filled(tmp_path, 0)
    (tmp_path / "head.json").write_text('{"head": "zero"}')
    with pytest.raises(CorruptData):
        FolderStore(tmp_path).head()


def test_prune_keeps_head_newest_and_protected(tmp_path: Path) -> None:
    store = filled(tmp_path, *range(6))
    store.rewind(4)
    store.publish(tensors(6), 6, 4)
    assert store.prune(2, protect=[1]) == [0, 2, 3, 5]
    assert store.versions() == [1, 4, 6]
    assert store.prune(0) == [1, 4]
    assert (store.head(), store.highest()) == (6, 6)


KILLED = """
import os, sys, torch
from pathlib import Path
from rillflow.weights import FolderStore, sealed

def die(*arguments):
    os._exit(9)

def die_half_way(path, content):
    path.write_bytes(b"half")
    os._exit(9)

for moment in sys.argv[2:]:
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        continue
    store = FolderStore(Path(sys.argv[1]) / moment)
    if moment == "half-written":
        sealed._write = die_half_way
    elif moment == "before-rename":
        sealed._rename = die
    else:
        store._move = die
    store.publish({"a": torch.ones(3)}, 1, 0)
"""


def test_a_kill_while_publishing(tmp_path: Path) -> None:
    unseen = ("half-written", "before-rename")
    moments = (*unseen, "before-the-head-moves")
    for moment in moments:
        filled(tmp_path / moment, 0)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *moments], timeout=60, check=True)
    for moment in moments:
        store = FolderStore(tmp_path / moment)
        seen = [] if moment in unseen else [1]
        assert store.head() == 0
        assert store.versions() == [0, *seen]
        assert store.rewind(0) == seen
        assert not list((tmp_path / moment).glob(".*"))
        number = 1 + len(seen)
        store.publish(tensors(5), number, 0)
        assert equal(store.pull(number), tensors(5))


def test_a_full_disk_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.weights.sealed.os.fsync", full)
        with pytest.raises(DiskFull):
            store.publish(tensors(1), 1, 0)
    assert sorted(os.listdir(tmp_path)) == ["head.json", "v00000000"]
    store.publish(tensors(1), 1, 0)
    assert store.head() == 1
