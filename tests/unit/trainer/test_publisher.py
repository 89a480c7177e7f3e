"""Publication in the background: of whole weights and of adapters, and what a LoRA policy saves by it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_world import Ledger, Unigram, start

from rillflow.errors import DeadlineExceeded, DiskFull
from rillflow.trainer.background import Background, HostCopy
from rillflow.trainer.publisher import KEEP_VERSIONS, Publisher
from rillflow.weights import FolderStore
from rillflow.weights.adapters import Adapter, merged

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
    publisher = Publisher(store, torch.float32, lambda: {2})
    store.publish({"w": torch.zeros(1)}, 0, None)
    for version in range(1, 9):
        publisher.take({"w": torch.full((1,), float(version))})
        publisher.begin(version, version - 1)
    publisher.finish()
    assert store.versions() == [0, 2, *range(9 - KEEP_VERSIONS, 9)]
    assert store.pull(8)["w"].item() == 8


def test_what_was_raised_comes_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.publish({"w": torch.zeros(1)}, 0, None)
    publisher = Publisher(store, torch.float32, set)

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
    background.start(lambda: (release.wait(10), None)[1])
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
