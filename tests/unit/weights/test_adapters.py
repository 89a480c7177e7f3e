"""Versions that are adapters: readers get whole weights, bases stay, damage is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rillflow.errors import CorruptData, WeightsError
from rillflow.weights import FolderStore
from rillflow.weights.codec import Adapter, merged

RANK, ALPHA = 2, 6.0


def base(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(8, 4, generator=generator).to(dtype)
    return {
        "embed.weight": embed,
        "head.weight": embed,
        "q.weight": torch.randn(6, 4, generator=generator).to(dtype),
        "norm.weight": torch.randn(4, generator=generator).to(dtype),
    }


def adapter(seed: int, name: str = "q.weight", out: int = 6) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.randn(RANK, 4, generator=generator), torch.randn(out, RANK, generator=generator)
    return Adapter({f"{name}.lora_A": low, f"{name}.lora_B": high}, RANK, ALPHA)


def filled(folder: Path, *versions: int, dtype: torch.dtype = torch.float32) -> FolderStore:
    store = FolderStore(folder)
    store.publish(base(dtype), 0, None)
    for version in versions:
        store.publish_adapter(adapter(version), version, store.head(), 0)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pulled_is_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    store = filled(tmp_path, 1, 2, dtype=dtype)
    one = adapter(2).tensors
    delta = (ALPHA / RANK) * one["q.weight.lora_B"].double() @ one["q.weight.lora_A"].double()
    pulled = store.pull(2)
    assert set(pulled) == set(base())
    assert {tensor.dtype for tensor in pulled.values()} == {dtype}
    exact = base(dtype)["q.weight"].double() + delta
    torch.testing.assert_close(
        pulled["q.weight"].double(), exact, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-5
    )
    assert torch.equal(pulled["norm.weight"], base(dtype)["norm.weight"])
    assert torch.equal(store.pull(0)["q.weight"], base(dtype)["q.weight"]), "the base is as it was"
    assert store.adapter(0) is None
    assert torch.equal(FolderStore(tmp_path).pull(2)["q.weight"], pulled["q.weight"]), "every reader merges the same"


def test_tied_weights_follow_the_one_they_are_tied_to() -> None:
    weights = merged(base(), adapter(1, "head.weight", out=8))
    assert weights["embed.weight"] is weights["head.weight"]
    assert not torch.equal(weights["head.weight"], base()["head.weight"])


def test_only_the_adapter_is_written(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    assert sorted(os.listdir(tmp_path / "v00000001")) == ["adapter.safetensors", "manifest.json"]
    manifest = json.loads((tmp_path / "v00000001" / "manifest.json").read_text())
    assert manifest["adapter"] == {"rank": RANK, "alpha": ALPHA, "base": 0}
    assert set(manifest["tensors"]) == {"q.weight.lora_A", "q.weight.lora_B"}


def test_a_base_that_is_needed_is_never_pruned(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3)
    assert store.prune(1) == [1, 2]
    assert store.versions() == [0, 3]
    store.publish(base(), 4, 3)
    assert store.prune(1) == [0, 3], "nothing belongs to it any more"


def test_a_base_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 1, 2, 3)
    assert store.pull(1)["norm.weight"] is store.pull(2)["norm.weight"]
    store.mend({name: tensor * 2 for name, tensor in base(torch.bfloat16).items()}, 0)
    assert store.pull(3)["norm.weight"].dtype == torch.bfloat16, "not what it was before it was written again"


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("change", ["flip", "remove", "manifest"])
def test_a_damaged_base_or_adapter_is_refused(tmp_path: Path, version: int, change: str) -> None:
    filled(tmp_path, 1)
    folder = tmp_path / f"v{version:08d}"
    (weights,) = folder.glob("*.safetensors")
    match change:
        case "flip":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "remove":
            weights.unlink()
        case "manifest":
            (folder / "manifest.json").unlink()
    with pytest.raises(CorruptData):
        FolderStore(tmp_path).pull(1)


def test_a_base_that_was_removed_is_a_clear_error(tmp_path: Path) -> None:
    filled(tmp_path / "w", 1)
    os.rename(tmp_path / "w" / "v00000000", tmp_path / "gone")
    with pytest.raises(CorruptData, match="needs version 0, which does not exist"):
        FolderStore(tmp_path / "w").pull(1)


@pytest.mark.parametrize(
    "wrong",
    [
        adapter(1, "nothing.weight"),
        adapter(1, out=5),
        adapter(1, "norm.weight"),
        Adapter({"q.weight.lora_A": torch.ones(2, 4)}, 2, 1.0),
        Adapter({**adapter(1).tensors, "stray": torch.ones(1)}, 2, 1.0),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, wrong: Adapter) -> None:
    store = filled(tmp_path)
    store.publish_adapter(wrong, 1, 0, 0)
    with pytest.raises(CorruptData):
        store.pull(1)


def test_adapters_of_adapters_do_not_exist(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    with pytest.raises(WeightsError, match="is an adapter itself"):
        store.publish_adapter(adapter(2), 2, 1, 1)
    with pytest.raises(WeightsError, match="version 7 is not"):
        store.publish_adapter(adapter(2), 2, 1, 7)
    assert store.head() == 1


def test_a_damaged_version_is_mended_as_a_whole_one(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    whole = store.pull(1)
    (tmp_path / "v00000001" / "adapter.safetensors").unlink()
    assert store.mend(whole, 1)
    assert store.adapter(1) is None
    assert torch.equal(store.pull(1)["q.weight"], whole["q.weight"])
    assert not store.mend(whole, 1)
