"""`rillflow export`: a plain folder that transformers loads, with the very numbers of the version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder
from rillflow.trainer.checkpoint import Checkpoints, State
from rillflow.weights import FolderStore, models
from rillflow.weights.codec import Adapter
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import load_policy_model, load_tokenizer

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tiny policy, a little further each version."""
    generator = torch.Generator().manual_seed(version)
    state = load_policy_model("tiny", "fp32", torch.device("cpu")).state_dict()
    moved: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in moved:
            noise = 0.02 * version * torch.randn(tensor.shape, generator=generator)
            moved[tensor.data_ptr()] = (tensor + noise).to(dtype)
    return {name: moved[tensor.data_ptr()] for name, tensor in state.items()}


def logits(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    model = load_policy_model("tiny", "fp32", torch.device("cpu"))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        return model(IDS).logits


def exported(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path / "runs")


def published(run: RunFolder, *versions: int, dtype: torch.dtype = torch.float32) -> FolderStore:
    store = FolderStore(run.weights("agent"))
    for version in versions:
        store.publish(weights(version, dtype), version, store.head())
    return store


def call(run: RunFolder, target: Path, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["export", str(run.root), str(target), *options])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_was_published(run: RunFolder, tmp_path: Path, dtype: torch.dtype) -> None:
    published(run, 0, 3, dtype=dtype)
    assert "version 3 of agent (the latest)" in call(run, tmp_path / "out")
    out = tmp_path / "out"
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(out))
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert torch.equal(exported(out), logits(weights(3, dtype)))
    text = "find the lamp"
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == load_tokenizer("tiny")(text)["input_ids"]
    call(run, tmp_path / "older", "--version", "0", "--policy", "agent")
    assert torch.equal(exported(tmp_path / "older"), logits(weights(0, dtype)))


def test_many_weights_are_in_shards(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(run, 2)
    monkeypatch.setattr(models, "SHARD_SIZE", "200KB")
    call(run, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert torch.equal(exported(tmp_path / "out"), logits(weights(2)))


def test_a_version_that_only_a_checkpoint_has(run: RunFolder, tmp_path: Path) -> None:
    published(run, 0)
    model = load_policy_model("tiny", "fp32", torch.device("cpu"))
    masters = {name: weights(4)[name] for name, _ in model.named_parameters()}
    state = State(version=4, step=4, recipe="", random={})
    Checkpoints(run.checkpoints("agent"), 2).save(state, masters | {"critic/score.weight": torch.ones(1, 4)}, {})
    call(run, tmp_path / "out")
    assert torch.equal(exported(tmp_path / "out"), logits(weights(4)))


def evaluated(run: RunFolder, **rewards: float | None) -> None:
    lines = [{"event": "evaluation", "version": int(name[1:]), "reward": reward} for name, reward in rewards.items()]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_best_is_that_of_the_highest_reward(run: RunFolder, tmp_path: Path) -> None:
    store = published(run, 0, 1, 2, 3)
    evaluated(run, v0=0.3, v1=0.8, v2=None, v3=0.5)
    assert "version 1 of agent (the best: held-out reward 0.800)" in call(run, tmp_path / "a", "--version", "best")
    store.prune(2, protect=[0])
    said = call(run, tmp_path / "b", "--version", "best")
    assert "version 3" in said
    assert "version 1 had 0.800" in said
    evaluated(run, v1=0.8)
    assert "version 1 was best and is not kept" in call(run, tmp_path / "c", "--version", "best", code=2)
    evaluated(run)
    assert "no evaluation has ended" in call(run, tmp_path / "c", "--version", "best", code=2)


def test_what_cannot_be_exported_is_said_and_nothing_is_left(run: RunFolder, tmp_path: Path) -> None:
    assert "nothing of agent has been published" in call(run, tmp_path / "out", code=2)
    store = published(run, 0, 1, 2)
    store.rewind(1)
    assert "version 2 is not kept" in call(run, tmp_path / "out", "--version", "2", code=2)
    assert "'newest' is not a version" in call(run, tmp_path / "out", "--version", "newest", code=2)
    assert "no policy 'judge'" in call(run, tmp_path / "out", "--policy", "judge", code=2)
    assert "is not an adapter" in call(run, tmp_path / "out", "--adapter", code=2)
    (run.weights("agent") / "v00000001" / "model.safetensors").write_bytes(b"other")
    assert "instead of" in call(run, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "out").mkdir()
    assert "exists already" in call(run, tmp_path / "out", "--version", "0", code=2)


def low_rank(model: Any) -> Adapter:
    generator = torch.Generator().manual_seed(8)
    tensors = {}
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            tensors[f"{name}.lora_A"] = torch.randn(2, weight.shape[1], generator=generator)
            tensors[f"{name}.lora_B"] = 0.1 * torch.randn(weight.shape[0], 2, generator=generator)
    return Adapter(tensors, 2, 4.0)


@pytest.mark.needs("peft")
def test_an_adapter_is_merged_or_a_peft_folder(run: RunFolder, tmp_path: Path) -> None:
    import peft

    base = load_policy_model("tiny", "fp32", torch.device("cpu"))
    store = published(run, 0)
    store.publish_adapter(low_rank(base), 1, 0, 0)
    call(run, tmp_path / "merged")
    call(run, tmp_path / "adapter", "--adapter")
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    merged = exported(tmp_path / "merged")
    assert torch.equal(merged, logits(store.pull(1)))
    assert not torch.allclose(merged, logits(store.pull(0)))
    plain = AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")(IDS).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
