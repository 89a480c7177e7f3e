"""Loads a policy's model and tokenizer, for trainers and engines alike, so version 0 is the same for all.

Invariants: weights are read from safetensors only; code of a model repository is never run; a hub is used only for a
name of the form `org/name` that is not an existing folder.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Literal

import torch

from rillflow.errors import ConfigError
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
