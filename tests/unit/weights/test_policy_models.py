"""Loading policies by folder or name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rillflow.errors import ConfigError
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_in_either_dtype(saved: Path) -> None:
    full = load_policy_model(str(saved), "fp32", CPU)
    half = load_policy_model(str(saved), "bf16", CPU)
    assert {parameter.dtype for parameter in full.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert not full.training
    assert full.config._attn_implementation == "sdpa"


def test_the_shipped_policy_loads() -> None:
    assert model_folder("tiny").name == "tiny"
    model = load_policy_model("tiny", "fp32", CPU)
    assert model.config.vocab_size >= len(load_tokenizer("tiny"))


def test_a_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    for name in ("nowhere", str(tmp_path / "nowhere"), "./a/b"):
        with pytest.raises(ConfigError, match="hf download"):
            model_folder(name)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_folder(str(tmp_path))


def test_hub_names_pass_through() -> None:
    assert str(model_folder("Some-Org/Some.Model-1")) == "Some-Org/Some.Model-1"


def test_a_broken_folder_is_a_config_error(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load"):
        load_policy_model(str(saved), "fp32", CPU)


def test_pickled_weights_are_not_read(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot load"):
        load_policy_model(str(saved), "fp32", CPU)


def test_devices() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError):
        pick_device("abacus")
    with pytest.raises(ConfigError, match="GPUs"):
        pick_device("cuda:63")


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_a_config_error(saved: Path, damage: Callable[[bytes], bytes]) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match="cannot load"):
        load_policy_model(str(saved), "fp32", CPU)


@pytest.mark.parametrize("change", ["missing", "of another shape"])
def test_weights_are_never_invented(saved: Path, change: str) -> None:
    file = saved / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "mlp" in name)
    tensor = tensors.pop(name)
    if change == "of another shape":
        tensors[name] = torch.cat([tensor, tensor])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"mlp|mismatch"):
        load_policy_model(str(saved), "fp32", CPU)
