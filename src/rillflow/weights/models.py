"""Models on disk: load a policy's model and tokenizer, and write plain Hugging Face folders.

Trainers and engines load models here alike, so version 0 is the same for all. Folders are made from a policy's weights
or from a GGUF file. Invariants: a folder exists as a whole or not at all, and an existing folder is not overwritten; an
export has all of a policy's weights, under the names of its model; the folder of a GGUF file is found by the file's
content.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from xxhash import xxh3_128

from rillflow.errors import ConfigError, WeightsError
from rillflow.storage import disk_errors, fsync_folder
from rillflow.weights.codec import LORA_A, Adapter
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rillflow.contracts import Tensors

Dtype = Literal["fp32", "bf16"]

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCORE = "score.weight"


def load_policy_model(name: str, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    """Load the causal language model, without dropout, for training or serving."""
    from transformers import AutoModelForCausalLM

    model, found = _load(
        AutoModelForCausalLM,
        name,
        dtype=DTYPES[dtype],
        attn_implementation="sdpa",
        use_safetensors=True,
        output_loading_info=True,
    )
    _refuse_invented(name, found)
    _choose_products(dtype, device)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_scalar_model(name: str, dtype: Dtype, device: torch.device) -> tuple[PreTrainedModel, bool]:
    """Load the model with a head of one output, `score`, without dropout; return whether that head is new (not in the
    files)."""
    from transformers import AutoModelForSequenceClassification

    model, found = _load(
        AutoModelForSequenceClassification,
        name,
        dtype=DTYPES[dtype],
        attn_implementation="sdpa",
        use_safetensors=True,
        output_loading_info=True,
        num_labels=1,
    )
    new = _SCORE in found.get("missing_keys", ())
    _refuse_invented(name, found, apart=_SCORE)
    _choose_products(dtype, device)
    return model.to(device).eval(), new


def rotary_limit(config: Any) -> int | None:
    """Return the length beyond which the library changes the rotary embedding of all sequences of a batch as soon as
    one of them is longer; None where lengths change nothing."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind == "dynamic":
        return int(config.max_position_embeddings)
    return int(rope.get("original_max_position_embeddings", 0)) or None if kind == "longrope" else None


def _choose_products(dtype: Dtype, device: torch.device) -> None:
    """Choose the library for matrix products on ARM, once for the process.

    torch (2.13) gives fp32 products to oneDNN, which takes about 60 microseconds longer for each than torch's BLAS, as
    long as a small product takes. For bf16 oneDNN is faster.
    """
    if device.type == "cpu" and platform.machine() == "aarch64":
        torch.backends.mkldnn.set_flags(dtype != "fp32")  # type: ignore[no-untyped-call]


def _refuse_invented(name: str, found: dict[str, Any], apart: str = "") -> None:
    """Refuse files that lack weights: these would be drawn at random, differently in every process."""
    missing = sorted(str(key) for key in (*found.get("missing_keys", ()), *found.get("mismatched_keys", ())))
    missing = [key for key in missing if key != apart]
    if missing:
        raise ConfigError(
            f"the files of {name} lack {len(missing)} weights that its config.json asks for, such as {missing[0]}",
            "download the model again: files and config.json must belong to the same causal language model",
        )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name)
    return tokenizer


def _load(kind: Any, name: str, **options: Any) -> Any:
    folder = model_folder(name)
    try:
        return kind.from_pretrained(str(folder), trust_remote_code=False, **options)
    except Exception as error:  # a damaged file makes the libraries raise anything
        raise ConfigError(
            f"cannot load {name}: {type(error).__name__}: {error}",
            "the folder must hold config.json, *.safetensors and the tokenizer's files; hub names are fetched only "
            "with HF_HUB_OFFLINE=0 in the environment, where the hub can be reached",
        ) from error


def pick_device(name: str) -> torch.device:
    """Return a device; `auto` is the GPU if there is one. ConfigError for a device that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", "one of: auto, cpu, cuda, cuda:0 …") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} does not exist: found {torch.cuda.device_count()} GPUs", "use auto or cpu")
    return device


# ---------------------------------------------------------------- export


SHARD_SIZE = "4GB"


def export_model(tensors: Tensors, model: str, target: Path) -> None:
    """Write a folder with config, weights (in shards if they are large), tokenizer and generation config.

    `model` is the recipe's model: everything but the weights comes from there.
    """
    with new_folder(target) as folder:
        loaded = load_policy_model(model, "fp32", torch.device("cpu"))
        fill_model(loaded, tensors)
        save_model(loaded, model, folder)


def save_model(loaded: PreTrainedModel, model: str, folder: Path) -> None:
    """Write a loaded model and the tokenizer of `model` into an existing folder."""
    loaded.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    load_tokenizer(model).save_pretrained(folder)


@torch.no_grad()
def fill_model(model: PreTrainedModel, tensors: Tensors) -> None:
    """Give the model these weights and their dtype. WeightsError if some of its weights are missing."""
    own, known = model.state_dict(), _with_ties(model, tensors)
    if missing := sorted(name for name in own if name not in known):
        raise WeightsError(
            f"{len(missing)} weights of the model are not in this version, such as {missing[0]}",
            "the recipe's model is not the one that was trained",
        )
    if other := sorted(name for name, tensor in own.items() if tensor.shape != known[name].shape):
        raise WeightsError(
            f"{other[0]} has another shape than in the model", "the recipe's model is not the one that was trained"
        )
    dtypes = {known[name].dtype for name in own if known[name].is_floating_point()}
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtype=dtypes.pop())
    model.load_state_dict({name: known[name] for name in own})


def _with_ties(model: PreTrainedModel, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors, also under the names of tied weights."""
    place = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    by_place = {place[name]: tensor for name, tensor in tensors.items() if name in place}
    return {**tensors, **{name: by_place[at] for name, at in place.items() if name not in tensors and at in by_place}}


def export_adapter(adapter: Adapter, model: str, target: Path) -> None:
    """Write a folder in peft's format, for `PeftModel.from_pretrained` on `model`."""
    with new_folder(target) as folder:
        named = {f"base_model.model.{_peft_name(name)}": t.contiguous() for name, t in adapter.tensors.items()}
        save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model,
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in adapter.weights}),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _peft_name(name: str) -> str:
    """Return peft's name: `….q_proj.lora_A.weight` for `….q_proj.weight.lora_A`."""
    weight, end = name[: -len(LORA_A)], name[-len(LORA_A) :]
    return f"{weight.removesuffix('.weight')}{end}.weight"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `target` afterwards. ConfigError if `target` exists."""
    if target.exists():
        raise ConfigError(f"{target} exists already", "give the name of a folder that does not exist yet")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_folder(target.parent)


# ---------------------------------------------------------------- GGUF files


SUFFIX = ".gguf"
_CHUNK = 1 << 20
_TIED = "lm_head.weight"


def cache_folder() -> Path:
    """Return the folder for files that can be made again: $XDG_CACHE_HOME/rillflow, by default ~/.cache/rillflow."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rillflow"


def model_from_gguf(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of the file's model in bf16, which is made once under `cache`, by default the user's cache."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "give the path of a GGUF file")
    target = (cache or cache_folder() / "models") / f"{path.stem}-{_digest(path)}"
    if not target.is_dir():
        with new_folder(target) as folder:
            _write_gguf(path, folder)
    return target


def _digest(path: Path) -> str:
    seen = xxh3_128()
    with disk_errors(path), open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            seen.update(chunk)
    return seen.hexdigest()[:16]


def _write_gguf(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError as error:
        raise ConfigError(f"GGUF files need more packages: {error}", "pip install 'rillflow[gguf]'") from error
    except Exception as error:  # the libraries raise many kinds of errors for unreadable files
        raise ConfigError(
            f"cannot read {path}: {type(error).__name__}: {error}", "give a GGUF file of a causal language model"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are no longer quantised
    model.config.dtype = "bfloat16"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop(_TIED, None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
