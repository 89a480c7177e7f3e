"""Folders and object stores as sources of weights, and the copy of a store that an object store holds."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from rillflow.errors import ConfigError, CorruptData, Unavailable, WeightsError
from rillflow.weights import FolderStore
from rillflow.weights.folder import Folder
from rillflow.weights.manifest import WeightSource, key_of
from rillflow.weights.transport import object_store
from rillflow.weights.transport.object_store import ObjectSource, Uploader, uploader
from rillflow.weights.transport.sources import ApartSource, FolderSource, HttpSource, open_source
from weight_servers import leaves_no_write_behind

KEY = key_of("the run's token")
_names = itertools.count()


def tensors(version: int) -> dict[str, torch.Tensor]:
    embed = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    embed[version] += 1
    return {"embed": embed, "head": embed}


def filled(folder: Path, versions: int = 5, key: bytes = KEY) -> FolderStore:
    store = FolderStore(folder, key, deltas=True, snapshot_every=3)
    for version in range(versions):
        store.publish(tensors(version), version, store.head())
    return store


@pytest.fixture
def url() -> Iterator[str]:
    yield f"memory://weights-{os.getpid()}-{next(_names)}"
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["folder", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> tuple[FolderStore, Any]:
    """A store, and what makes sources of it or of a copy."""
    store = filled(tmp_path / "w" / "p")
    if request.param == "folder":
        return store, lambda key=KEY: open_source(tmp_path / "w", "p", key=key, cache=tmp_path / "cache")
    where = url if request.param == "memory" else f"file://{tmp_path}/copies"
    Uploader(store, f"{where}/p").copy()
    return store, lambda key=KEY: open_source(where, "p", key=key, cache=tmp_path / "cache")


async def test_a_source_gives_what_was_published(place: tuple[FolderStore, Any]) -> None:
    store, opened = place
    source: WeightSource = opened()
    assert await source.line() == store.line()
    for version in store.versions():
        manifest = await source.manifest(version)
        assert manifest == store.manifest(version)
        for name in manifest.files:
            path = await source.file(version, name)
            assert path.read_bytes() == (store.path(version) / name).read_bytes()
            assert await source.file(version, name) == path
    with pytest.raises(WeightsError):
        await source.manifest(9)
    with pytest.raises((WeightsError, CorruptData)):
        await source.file(4, "nothing.rfd")
    await source.forget(4)
    await source.close()


async def test_only_this_runs_key_will_do(place: tuple[FolderStore, Any]) -> None:
    _, opened = place
    source = opened(key_of("another token"))
    with pytest.raises(CorruptData, match="not signed with this run's key"):
        await source.line()
    with pytest.raises(CorruptData, match="not signed with this run's key"):
        await source.file(0, "model.safetensors")
    await opened(b"").line()


async def test_a_line_is_waited_for(tmp_path: Path, url: str) -> None:
    store = filled(tmp_path / "w", 2)
    copies = Uploader(store, url)
    copies.copy()
    for source in (FolderSource(tmp_path / "w", KEY), ObjectSource(url, tmp_path / "cache", KEY, poll=0.02)):
        known = await source.line()
        assert await source.line(known, wait=0.05) == known
        waiting = asyncio.create_task(source.line(known, wait=30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        version = store.highest() + 1
        store.publish(tensors(version), version, store.head())
        copies.copy()
        assert (await waiting).head == version


async def test_a_store_where_nothing_was_published(tmp_path: Path, url: str) -> None:
    for source in (FolderSource(tmp_path / "none", KEY), ObjectSource(url, tmp_path / "cache", KEY)):
        assert (await source.line()).head is None


async def test_damaged_files_are_refused(place: tuple[FolderStore, Any], tmp_path: Path, url: str) -> None:
    store, opened = place
    source = opened()
    manifest = await source.manifest(4)
    (name,) = manifest.files
    if isinstance(source, FolderSource):
        path = store.path(4) / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        files, root = fsspec.core.url_to_fs(source._source._url)
        data = files.cat_file(f"{root}/v00000004/{name}")
        files.pipe_file(f"{root}/v00000004/{name}", data[:-1] + b"x")
    with pytest.raises(CorruptData):
        await source.file(4, name)
    if isinstance(source, ApartSource):
        assert not (tmp_path / "cache" / "p" / "v00000004" / name).exists()
        files.pipe_file(f"{root}/v00000004/{name}", data)
        assert (await source.file(4, name)).read_bytes() == data, "the wrong bytes are not kept"


async def test_what_has_come_is_not_fetched_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_BLOCK", 100)
    monkeypatch.setattr(object_store, "_FIRST_PAUSE", 0.0)
    store = filled(tmp_path / "w")
    Uploader(store, url).copy()
    asked: list[tuple[int, int]] = []
    broken = [2000]

    def cat(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if start is None:
            return before(self, path, start, end, **options)
        if start >= broken[0]:
            raise ConnectionError("the link is down")
        asked.append((start, end))
        return before(self, path, start, end, **options)

    before = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    with pytest.raises(Unavailable, match="the link is down"):
        await ObjectSource(url, tmp_path / "cache", KEY, streams=1).file(0, "model.safetensors")
    assert asked == [(at, at + 100) for at in range(0, 2000, 100)]
    broken[0] = 1 << 40
    asked.clear()
    path = await ObjectSource(url, tmp_path / "cache", KEY, streams=3).file(0, "model.safetensors")
    assert min(asked)[0] == 2000
    assert path.read_bytes() == (store.path(0) / "model.safetensors").read_bytes()
    asked.clear()
    await ObjectSource(url, tmp_path / "cache", KEY).file(0, "model.safetensors")
    assert asked == [], "also not after a restart"


async def test_sources_by_their_names(tmp_path: Path) -> None:
    assert isinstance(open_source(tmp_path, "p", cache=tmp_path), FolderSource)
    assert isinstance(open_source(str(tmp_path), "p", cache=tmp_path), FolderSource)
    for where, kind in {
        "memory://x": ObjectSource,
        "http://a:1": HttpSource,
        "https://a:1,http://b:2": HttpSource,
    }.items():
        far = open_source(where, "p", cache=tmp_path, token="t")
        assert isinstance(far, ApartSource)
        assert isinstance(far._source, kind)
        await far.close()
    with pytest.raises(ConfigError, match="nosuch://"):
        open_source("nosuch://x", "p", cache=tmp_path)


async def test_a_store_that_hangs_takes_no_thread_from_others(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one of those in which an engine prepares its weights, or a session is written."""
    released = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: released.wait(60))
    sources = [open_source(url, f"p{number}", cache=tmp_path) for number in range(40)]
    asking = [asyncio.create_task(source.line()) for source in sources]
    try:
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: 7) == 7
    finally:
        for task in asking:
            task.cancel()
        released.set()
        await asyncio.gather(*asking, return_exceptions=True)
        for source in sources:
            await source.close()


async def test_a_store_that_hangs_is_told_of_soon(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look at the line before they start."""
    released = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: released.wait(60))
    monkeypatch.setattr(object_store, "_SMALL_DEADLINE", 0.01)
    monkeypatch.setattr(object_store, "_FIRST_PAUSE", 0.0)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match="does not answer"):
                await ObjectSource(url, tmp_path).line()
    finally:
        released.set()


async def test_who_is_cancelled_leaves_no_write_behind(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "w")
    Uploader(store, url).copy()
    await leaves_no_write_behind(ObjectSource(url, tmp_path / "cache", KEY).file(0, "model.safetensors"), monkeypatch)


# ---------------------------------------------------------------- copies


def there(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def here(store: FolderStore) -> dict[str, bytes]:
    root = store.path(0).parent
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_copy_is_the_store(tmp_path: Path, url: str) -> None:
    store = filled(tmp_path)
    copies = Uploader(store, url)
    copies.copy()
    assert there(url) == here(store)
    store.rewind(3)
    store.publish(tensors(9), 5, 3)
    store.prune(1)
    copies.copy()
    assert there(url) == here(store), "what was removed is removed there"


def test_a_new_trainer_goes_on_with_the_copy(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path)
    Uploader(store, url).copy()
    store.prune(1)
    put: list[str] = []
    before = MemoryFileSystem.put_file
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, a, b, **more: (put.append(b), before(self, a, b, **more))[1]
    )
    store.publish(tensors(5), 5, 4)
    Uploader(store, url).copy()
    assert len(put) == 1
    assert there(url) == here(store)


def test_a_version_that_was_mended_is_copied_again(tmp_path: Path, url: str) -> None:
    store = filled(tmp_path)
    copies = Uploader(store, url)
    copies.copy()
    next(store.path(4).glob("delta*")).unlink()
    assert store.mend(tensors(4), 4)
    copies.copy()
    assert there(url) == here(store)


def test_a_head_comes_after_all_that_it_names(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path)
    copies = Uploader(store, url)
    order: list[str] = []
    for name in ("put_file", "mv"):
        before = getattr(MemoryFileSystem, name)

        def noted(self: Any, source: str, target: str, before: Any = before, **more: Any) -> Any:
            order.append(target.split("/", 2)[2])
            return before(self, source, target, **more)

        monkeypatch.setattr(MemoryFileSystem, name, noted)
    copies.copy()
    assert order[-1] == "head.json"
    for version in range(5):
        mine = [place for place, name in enumerate(order) if name.startswith(f"v{version:08d}")]
        assert order[mine[-1]].endswith("manifest.json")
        assert mine == list(range(mine[0], mine[-1] + 1))


def test_a_store_that_fails_holds_nobody_up_and_gets_the_newest_later(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, 1)
    copies = Uploader(store, url, pause=0.01)
    broken, failed = threading.Event(), threading.Event()
    broken.set()
    before = MemoryFileSystem.put_file

    def put(self: Any, source: str, target: str, **more: Any) -> None:
        if broken.is_set():
            failed.set()
            raise OSError("no route to host")
        before(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    copies.poke()
    assert failed.wait(60)
    for version in range(1, 8):
        store.publish(tensors(version), version, version - 1)
        store.prune(1)
        copies.poke()
    assert "head.json" not in there(url)
    broken.clear()
    copies.poke()
    assert copies.close(30)
    assert there(url) == here(store)


def test_who_copies_slowly_gets_it_all_though_versions_come_and_go(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    for version in range(3):
        store.publish(tensors(version), version, store.head())
    copies = Uploader(store, url)
    before = MemoryFileSystem.put_file

    def put(self: Any, source: str, target: str, **more: Any) -> None:
        version = store.highest() + 1
        store.publish(tensors(version), version, store.head())
        store.prune(1)
        before(self, source, target, **more)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", put)
        copies.copy()
    copied = Folder(tmp_path / "copy")
    for name, data in there(url).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    assert copied.head() == 2
    assert all(torch.equal(copied.pull(2)[name], tensor) for name, tensor in tensors(2).items())
    assert store.prune(1) == [0, 1, 2], "what was copied may go"


def test_the_end_waits_only_so_long(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Uploader(filled(tmp_path, 1), url)
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(30))
    copies.poke()
    assert not copies.close(0.05)
    gate.set()


def test_which_recipes_copy(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    assert uploader(store, None, "p") is None
    assert uploader(store, "http://far:9000", "p") is None
    assert uploader(store, "/some/folder", "p") is None
    copies = uploader(store, "memory://bucket/run/", "p")
    assert copies is not None
    assert copies._url == "memory://bucket/run/p"
