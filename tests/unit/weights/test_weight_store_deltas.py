"""A store that writes deltas: a pulled version equals the published one, by any chain, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from delta_stores import DELTA, SHAPE, WHOLE, files, filled, opened, same, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.weights import FolderStore
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.manifest import Entry, Line, kept_versions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_pulled_is_what_was_published(tmp_path: Path, dtype: torch.dtype) -> None:
    store = opened(tmp_path)
    for version in range(7):
        store.publish(weights(version, dtype), version, store.head())
    for reader in (store, FolderStore(tmp_path)):
        for version in range(7):
            assert same(reader.pull(version), weights(version, dtype)), version
    pulled = store.pull(6)
    assert pulled["head"].data_ptr() == pulled["embed"].data_ptr()


def test_a_whole_version_now_and_then(tmp_path: Path) -> None:
    store = filled(tmp_path, 9)
    assert [files(tmp_path, version) for version in range(9)] == [
        WHOLE, DELTA, DELTA, DELTA, DELTA | WHOLE, DELTA, DELTA, DELTA, DELTA | WHOLE,
    ]  # fmt: skip
    entries = store.line().entries
    assert sorted(entries) == list(range(9))
    assert (entries[0].delta_of, entries[4].delta_of, entries[5].delta_of) == (None, 3, 4)
    assert all(entries[version].delta_bytes < entries[0].full_bytes / 5 for version in range(1, 9))
    assert entries[4].full_bytes > 0
    assert entries[5].full_bytes == 0
    manifest = store.manifest(5)
    assert (manifest.delta_of, manifest.parent) == (4, 4)
    assert manifest.tensor_fingerprints() == {
        name: fingerprint(tensor) for name, tensor in weights(5).items() if name != "head"
    }


def test_the_callers_tensors_are_its_own(tmp_path: Path) -> None:
    """It may train on in the same memory: the store has a copy of what it published."""
    store = opened(tmp_path)
    tensors = weights(0)
    store.publish(tensors, 0, None)
    for version in range(1, 4):
        tensors["embed"][version] += 1
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        store.publish(tensors, version, version - 1)
        assert same(store.pull(version), expected)
        tensors["embed"][0] -= 7


def test_statistics(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = store.publish(weights(0), 0, None)
    second = store.publish(weights(1), 1, 0)
    entries = store.line().entries
    assert (first.delta_bytes, first.full_bytes, first.changed) == (0, entries[0].full_bytes, 1.0)
    assert (second.delta_bytes, second.full_bytes) == (entries[1].delta_bytes, 0)
    assert 0.005 < second.changed < 0.03
    assert second.seconds > 0


@pytest.mark.parametrize("what", ["names", "dtype", "shape", "ties", "everything"])
def test_what_has_no_delta_is_published_whole(tmp_path: Path, what: str) -> None:
    store = filled(tmp_path, 2)
    new = weights(2)
    if what == "names":
        new["more"] = torch.ones(2)
    elif what == "dtype":
        new["norm"] = new["norm"].float()
    elif what == "shape":
        new["norm"] = torch.ones(8, dtype=torch.bfloat16)
    elif what == "ties":
        new["head"] = new["head"].clone()
    else:
        new["embed"] = new["head"] = torch.randn(SHAPE).bfloat16()
    done = store.publish(new, 2, 1)
    assert files(tmp_path, 2) == WHOLE
    assert (done.delta_bytes, done.changed) == (0, 1.0)
    assert store.manifest(2).delta_of is None
    assert same(store.pull(2), new)
    store.publish(new, 3, 2)
    assert files(tmp_path, 3) == DELTA
    assert same(store.pull(3), new)


def test_nothing_changed(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    done = store.publish(weights(0), 1, 0)
    assert done.changed == 0
    assert 0 < store.line().entries[1].delta_bytes < 50
    assert same(store.pull(1), weights(0))


# ---------------------------------------------------------------- what is compiled


def test_until_deltas_can_be_made_at_once_versions_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for a compiler."""
    ready = False
    store = FolderStore(tmp_path, deltas=True, ready=lambda: ready)
    with monkeypatch.context() as patched:
        patched.setattr("rillflow.weights.previous.fingerprints", None)
        for version in range(2):
            store.publish(weights(version), version, store.head())
        store.mend(weights(1), 1)
    ready = True
    for version in range(2, 4):
        store.publish(weights(version), version, store.head())
    assert [files(tmp_path, version) for version in range(4)] == [WHOLE, WHOLE, DELTA, DELTA]
    for version in range(4):
        assert same(FolderStore(tmp_path).pull(version), weights(version))
        assert set(store.manifest(version).fingerprints) == set(weights(version)) - {"head"}


def test_without_deltas_nothing_is_compiled_or_loaded_for_it(tmp_path: Path) -> None:
    """Neither by the trainer nor by its nodes."""
    subprocess.run([sys.executable, "-c", WITHOUT_DELTAS, str(tmp_path)], check=True, timeout=120)


WITHOUT_DELTAS = """
import asyncio, sys, torch
from pathlib import Path
from rillflow.weights import FolderStore
from rillflow.weights.pull import Puller
from rillflow.weights.transport.sources import FolderSource

async def follow():
    store, node = FolderStore(Path(sys.argv[1])), Puller(FolderSource(Path(sys.argv[1])), initial=lambda: {})
    for version in range(3):
        tensors = {"w": torch.full((300,), float(version))}
        store.publish(tensors, version, store.head())
        assert torch.equal((await node.pull()).tensors["w"], tensors["w"])
    assert not FolderStore(Path(sys.argv[1])).mend(tensors, 2)
    assert not store.manifest(2).fingerprints

asyncio.run(follow())
assert "numba" not in sys.modules
"""


# ---------------------------------------------------------------- retention


def test_prune_keeps_what_is_needed_to_put_together_what_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 15)
    assert store.prune(2) == list(range(12))
    assert sorted(store.line().entries) == store.versions() == [12, 13, 14]
    store = filled(tmp_path / "more", 12)
    assert store.prune(2, protect=[6]) == [0, 1, 2, 3, 7]
    assert store.versions() == [4, 5, 6, 8, 9, 10, 11]
    for version in store.versions():
        assert same(FolderStore(tmp_path / "more").pull(version), weights(version))


def test_prune_keeps_the_deltas_of_nodes_that_are_behind(tmp_path: Path) -> None:
    store = filled(tmp_path, 15)
    assert store.prune(2, in_use=[9, 13]) == list(range(8))
    assert store.versions() == list(range(8, 15))
    assert store.prune(2, in_use=[9, 13], retain=3) == [8, 9, 10, 11], "who is too far behind takes a whole version"


def test_nodes_on_orphans_and_on_what_is_gone_hold_nothing_up(tmp_path: Path) -> None:
    store = filled(tmp_path, 10)
    store.mend(weights(8), 8)
    store.rewind(8)
    store.publish(weights(11), 10, 8)
    gone = store.prune(1, in_use=[9, 77])
    assert 9 in gone
    assert store.versions() == [8, 10]


def test_the_line_forgets_before_the_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 10)
    seen = []

    def watched(folder: Path) -> None:
        line = FolderStore(tmp_path).line()
        assert int(folder.name[1:]) not in line.entries
        left = [version for version in FolderStore(tmp_path).versions() if version not in seen]
        for version in left:
            FolderStore(tmp_path).pull(version)  # whenever it is killed, every file is whole
        seen.append(int(folder.name[1:]))
        folder.rename(tmp_path / f"gone-{folder.name}")

    monkeypatch.setattr("rillflow.weights.sealed.remove", watched)
    assert store.prune(1) == sorted(seen)
    assert seen == sorted(seen, reverse=True)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    entries: dict[int, Entry] = {}
    for version in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([version - 1, *entries])) if version else None
        whole = parent is None or draw(st.integers(0, 3)) == 0
        entries[version] = Entry(
            delta_of=parent, delta_bytes=0 if parent is None else 3, full_bytes=100 if whole else 0
        )
    head = draw(st.sampled_from(sorted(entries)))
    ancestors = {head}
    at: int | None = head
    while at is not None:
        ancestors.add(at)
        at = entries[at].delta_of
    return Line(head=head, orphaned=frozenset(set(entries) - ancestors), entries=entries)


versions = st.sets(st.integers(0, 15), max_size=3)


@given(lines(), st.integers(0, 4), versions, versions, st.integers(1, 15))
def test_whatever_is_kept_can_be_put_together(
    line: Line, keep: int, protect: set[int], in_use: set[int], retain: int
) -> None:
    stays = kept_versions(line, line.entries, {}, keep=keep, protect=protect, in_use=in_use, retain=retain)
    assert line.head in stays
    assert protect & set(line.entries) <= stays
    for version in stays:
        at = version
        while not line.entries[at].full_bytes:
            at = line.entries[at].delta_of or 0
            assert at in stays
    live = sorted(set(line.entries) - line.orphaned)
    for node in in_use & set(live):
        missing = [version for version in live if version > node and version not in stays]
        assert all(version not in live[-retain:] for version in missing)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(["publish", "publish", "publish", "restart", "rewind", "prune"]), max_size=14), st.data()
)
def test_any_life_of_a_store(tmp_path_factory: pytest.TempPathFactory, life: list[str], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = opened(folder, every=3)
    published = {0: weights(0)}
    store.publish(published[0], 0, None)
    for event in life:
        head = store.head()
        assert head is not None
        if event == "publish":
            version = store.highest() + 1
            published[version] = weights(data.draw(st.integers(0, 9)))
            store.publish(published[version], version, head)
        elif event == "prune":
            store.prune(data.draw(st.integers(0, 3)), protect=[0])
        else:
            if event == "restart":
                store = opened(folder, every=3)
            live = [version for version in store.versions() if version not in store.line().orphaned]
            target = data.draw(st.sampled_from(live)) if event == "rewind" else head
            assert not store.mend(published[target], target)
            store.rewind(target)
        line = FolderStore(folder).line()
        assert sorted(line.entries) == store.versions()
        assert line.entries == {version: store.manifest(version).entry for version in line.entries}
    reader = FolderStore(folder)
    for version in reader.versions():
        assert same(reader.pull(version), published[version])
    assert msgspec.json.decode((folder / "head.json").read_bytes(), type=Line).head == store.head()
