"""GGUF files as plain Hugging Face folders, which trainer, engines and servers all load.

Invariant: a folder is there whole or not at all, and is found again by the file's content, wherever the file lies.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from xxhash import xxh3_128

from rillflow.errors import ConfigError
from rillflow.storage import disk_errors
from rillflow.weights.export import new_folder

SUFFIX = ".gguf"
_CHUNK = 1 << 20
_TIED = "lm_head.weight"


def cache_folder() -> Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME/rillflow, by default ~/.cache/rillflow."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rillflow"


def model_from_gguf(path: Path, cache: Path | None = None) -> Path:
    """The folder of the model that the file holds, in bf16; made once, under `cache` (by default the user's own)."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", "give the path of a GGUF file")
    target = (cache or cache_folder() / "models") / f"{path.stem}-{_digest(path)}"
    if not target.is_dir():
        with new_folder(target) as folder:
            _write(path, folder)
    return target


def _digest(path: Path) -> str:
    seen = xxh3_128()
    with disk_errors(path), open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            seen.update(chunk)
    return seen.hexdigest()[:16]


def _write(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError as error:
        raise ConfigError(f"GGUF files need more packages: {error}", "pip install 'rillflow[gguf]'") from error
    except Exception as error:  # whatever the libraries raise of a file that they cannot read
        raise ConfigError(
            f"cannot read {path}: {type(error).__name__}: {error}", "give a GGUF file of a causal language model"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is whole again, and to be saved so
    model.config.dtype = "bfloat16"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop(_TIED, None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
