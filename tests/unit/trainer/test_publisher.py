"""Publication in the background: of whole weights and of adapters, and what a LoRA policy saves by it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_world import Ledger, Unigram, start

from rillflow.errors import DeadlineExceeded, DiskFull, Unavailable
from rillflow.trainer.background import Background, HostCopy
from rillflow.trainer.publisher import Publisher, Retention
from rillflow.weights import FolderStore
from rillflow.weights.codec import Adapter, merged

WIDE = 256


class Lora(Unigram):
    """A policy of which only an adapter of one weight trains (pushed by the step it is at, not by rewards)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base = {"q.weight": torch.randn(WIDE, WIDE, generator=generator), "norm": torch.ones(WIDE)}
        self.trained = {
            "q.weight.lora_A": torch.randn(2, WIDE, generator=generator),
            "q.weight.lora_B": torch.zeros(WIDE, 2),
        }

    def step(self, parts: Any, check: Any, publish: Any) -> dict[str, float]:
        def changed() -> None:
            self.trained["q.weight.lora_B"].add_(0.1)
            publish()

        return super().step(parts, check, changed)

    def adapter(self) -> Adapter:
        return Adapter(self.trained, 2, 4.0)

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return merged({name: tensor.to(dtype) for name, tensor in self.base.items()}, self.adapter())

    def masters(self) -> dict[str, torch.Tensor]:
        return super().masters() | self.trained

    def restore(self, masters: Any, moments: Any, steps: int) -> None:
        for name, tensor in self.trained.items():
            tensor.copy_(masters[name])
        super().restore({name: t for name, t in masters.items() if name not in self.trained}, moments, steps)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("delay", [0, 1])
def test_a_lora_policy_publishes_adapters_and_nodes_see_weights(tmp_path: Path, delay: int) -> None:
    worker = start(tmp_path, Ledger(3), Lora(), publish_delay=delay)
    store = FolderStore(tmp_path / "w")
    assert store.adapter(0) is None
    assert all(store.adapter(version) is not None for version in (1, 2, 3))
    pulled = store.pull(3)
    assert all(torch.equal(tensor, pulled[name]) for name, tensor in worker.weights(torch.float32).items())
    assert not torch.equal(store.pull(2)["q.weight"], pulled["q.weight"])
    full, adapter = size(tmp_path / "w" / "v00000000"), size(tmp_path / "w" / "v00000003")
    assert adapter < full / 20, (full, adapter)


def test_a_lora_policy_goes_on_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(2)
    start(tmp_path, ledger, Lora())
    ledger.batches = 4
    worker = start(tmp_path, ledger, Lora())
    straight = start(tmp_path / "straight", Ledger(4), Lora())
    store = FolderStore(tmp_path / "w")
    assert store.adapter(4) is not None
    assert torch.equal(store.pull(4)["q.weight"], straight.weights(torch.float32)["q.weight"])
    assert torch.equal(worker.trained["q.weight.lora_B"], straight.trained["q.weight.lora_B"])


@pytest.mark.parametrize("lost", ["removed", "damaged", "another dtype"])
def test_without_its_base_a_lora_policy_publishes_all_weights(tmp_path: Path, lost: str) -> None:
    ledger = Ledger(2)
    start(tmp_path, ledger, Lora(), publish_dtype=torch.bfloat16 if lost == "another dtype" else torch.float32)
    base = tmp_path / "w" / "v00000000"
    if lost == "removed":
        base.rename(tmp_path / "gone")
    elif lost == "damaged":
        (base / "model.safetensors").write_bytes(b"nothing")
    ledger.batches = 4
    worker = start(tmp_path, ledger, Lora())
    store = FolderStore(tmp_path / "w")
    for version in (2, 3, 4):
        assert store.adapter(version) is None
    pulled = store.pull(4)
    assert all(torch.equal(tensor, pulled[name]) for name, tensor in worker.weights(torch.float32).items())


def test_versions_that_somebody_needs_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    publisher = Publisher(store, torch.float32, Retention(keep=4, needed=lambda: {2}))
    store.publish({"w": torch.zeros(1)}, 0, None)
    for version in range(1, 9):
        publisher.take({"w": torch.full((1,), float(version))})
        publisher.begin(version, version - 1)
    publisher.finish()
    assert store.versions() == [0, 2, 5, 6, 7, 8]
    assert store.pull(8)["w"].item() == 8


def test_versions_that_nodes_serve_keep_what_comes_after_them(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, deltas=True, snapshot_every=3)
    served = {2}
    publisher = Publisher(store, torch.bfloat16, Retention(keep=1, in_use=lambda: served))
    publish_some(publisher, store, 9)
    assert store.versions() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    served.add(7)
    served.remove(2)
    publisher.prune()
    assert store.versions() == [0, 6, 7, 8]


@pytest.mark.parametrize("error", [Unavailable("the service is away"), TimeoutError()])
def test_when_nobody_tells_what_nodes_serve_nothing_is_removed(tmp_path: Path, error: Exception) -> None:
    def unknown() -> list[int]:
        raise error

    store = FolderStore(tmp_path)
    publish_some(Publisher(store, torch.bfloat16, Retention(keep=1, in_use=unknown)), store, 9)
    assert store.versions() == list(range(9))


def publish_some(publisher: Publisher, store: FolderStore, versions: int) -> dict[str, torch.Tensor]:
    """From one memory that is changed as soon as it was taken, as training does."""
    weights = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(2)).bfloat16()}
    store.publish(weights, 0, None)
    for version in range(1, versions):
        weights["w"][version] = version
        publisher.take(weights)
        weights["w"][0] += 1
        publisher.begin(version, version - 1)
    publisher.finish()
    return weights


def test_deltas_are_of_what_was_taken(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, deltas=True, snapshot_every=4)
    publisher = Publisher(store, torch.bfloat16, Retention(keep=20))
    assert publisher.statistics() == {}
    weights = publish_some(publisher, store, 7)
    expected = weights["w"].clone()
    expected[0] -= 1  # after the last one was taken
    assert torch.equal(FolderStore(tmp_path).pull(6)["w"], expected)
    entries = store.line().entries
    assert [version for version, entry in entries.items() if entry.full_bytes] == [0, 4]
    told = publisher.statistics()
    assert told["weights_delta_bytes"] == entries[6].delta_bytes
    assert told["weights_full_bytes"] == 0
    assert told["weights_changed"] == pytest.approx(2 / 5000)
    assert told["weights_publish_seconds"] > 0


def test_who_copies_the_store_hears_of_every_change(tmp_path: Path) -> None:
    heard: list[list[int]] = []
    store = FolderStore(tmp_path)
    publisher = Publisher(store, torch.bfloat16, Retention(keep=1), lambda: heard.append(store.versions()))
    publish_some(publisher, store, 4)
    assert heard == [[0, 1], [0, 1, 2], [0, 2], [0, 2, 3], [0, 3]]


def test_a_run_with_deltas_goes_on_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(3)
    options = {"publish_dtype": torch.bfloat16, "deltas": True}
    start(tmp_path, ledger, **options)
    store = FolderStore(tmp_path / "w")
    assert store.line().entries[3].delta_of == 2
    ledger.batches = 6
    worker = start(tmp_path, ledger, **options)
    straight = start(tmp_path / "straight", Ledger(6), publish_dtype=torch.bfloat16)
    assert store.line().entries[4].delta_of == 3, "the last version was read back"
    pulled, plain = store.pull(6), FolderStore(tmp_path / "straight" / "w").pull(6)
    for name, tensor in worker.weights(torch.bfloat16).items():
        assert torch.equal(pulled[name], tensor)
        assert torch.equal(pulled[name], plain[name])
    assert straight.steps == 6
    told = ledger.metrics[-1]
    assert told["weights_delta_bytes"] > 0
    assert 0 < told["weights_changed"] <= 1
    assert "weights_publish_seconds" in told


def test_what_was_raised_comes_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.publish({"w": torch.zeros(1)}, 0, None)
    publisher = Publisher(store, torch.float32)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.weights.sealed.os.fsync", full)
        publisher.take({"w": torch.ones(1)})
        publisher.begin(1, 0)
        with pytest.raises(DiskFull):
            publisher.take({"w": torch.ones(1)})
    publisher.check()
    assert store.versions() == [0]


# ---------------------------------------------------------------- what it is made of


def test_a_wait_for_background_work_has_a_deadline() -> None:
    release = threading.Event()
    background = Background("the work", deadline=0.05)
    background.start(lambda: (release.wait(60), None)[1])
    assert background.busy
    with pytest.raises(DeadlineExceeded, match="the work has not ended"):
        background.settle()
    release.set()
    background.close()


def test_a_copy_reuses_its_memory_and_keeps_ties() -> None:
    copy = HostCopy()
    embed = torch.ones(3, 2)
    first = copy.take({"embed": embed, "head": embed, "turned": torch.ones(2, 3).t()})
    assert first["head"] is first["embed"]
    assert first["embed"].data_ptr() != embed.data_ptr()
    embed.add_(1)
    assert first["embed"].sum() == 6
    second = copy.take({"embed": embed, "head": embed, "turned": torch.ones(3, 2)})
    assert second["embed"] is first["embed"]
    assert second["embed"].sum() == 12
    assert copy.take({"embed": embed.bfloat16()})["embed"].dtype == torch.bfloat16
    assert torch.equal(copy.take({"embed": embed + 0.1}, torch.bfloat16)["embed"], (embed + 0.1).bfloat16())


@pytest.mark.needs("cuda")
def test_on_a_gpu_only_what_changed_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, deltas=True, snapshot_every=4)
    publisher = Publisher(store, torch.bfloat16, Retention(keep=20))
    large = torch.randn(5_000_000, device="cuda").bfloat16()
    weights = {"large": large, "small": torch.randn(3000, device="cuda").bfloat16(), "tied": large}
    store.publish(weights, 0, None)
    expected = {}
    moved = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (moved.append(tensor.nbytes), to_host(tensor))[1])
    for version in range(1, 7):
        for tensor in (large, weights["small"]):
            tensor[torch.randint(0, len(tensor), (len(tensor) // 100,), device="cuda")] *= 1.01
        expected[version] = {name: to_host(tensor.clone()) for name, tensor in weights.items()}
        moved.clear()
        publisher.take(weights)
        large.mul_(1.5)
        publisher.begin(version, version - 1)
        publisher.finish()
        large.copy_(expected[version]["large"])
        if version % 4:
            assert sum(moved) < large.nbytes / 10
    for version, tensors in expected.items():
        pulled = FolderStore(tmp_path).pull(version)
        assert all(torch.equal(pulled[name], tensor) for name, tensor in tensors.items())
    assert [bool(entry.full_bytes) for entry in store.line().entries.values()] == [
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
