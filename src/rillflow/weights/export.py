"""Weights as plain Hugging Face folders, which any tool of that world loads.

Invariants: an export is there whole or not at all, and nothing that exists is overwritten; a policy's weights are all
in it, under the names that its model has.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from rillflow.errors import ConfigError, WeightsError
from rillflow.storage import disk_errors, fsync_folder
from rillflow.weights.adapters import A, Adapter
from rillflow.weights.models import load_policy_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Tensors

SHARD_SIZE = "4GB"


def export_model(tensors: Tensors, model: str, target: Path) -> None:
    """A folder with config, weights (in shards where they are many), tokenizer and generation config.

    `model` is what the recipe calls it: what is not a weight comes from there.
    """
    with new_folder(target) as folder:
        loaded = load_policy_model(model, "fp32", torch.device("cpu"))
        fill_model(loaded, tensors)
        save_model(loaded, model, folder)


def save_model(loaded: PreTrainedModel, model: str, folder: Path) -> None:
    """Write a model as it is, with the tokenizer of `model`, into a folder that is there."""
    loaded.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    load_tokenizer(model).save_pretrained(folder)


@torch.no_grad()
def fill_model(model: PreTrainedModel, tensors: Tensors) -> None:
    """Give the model these weights, and their dtype. WeightsError when they are not all of its weights."""
    own, known = model.state_dict(), _with_ties(model, tensors)
    if missing := sorted(name for name in own if name not in known):
        raise WeightsError(
            f"{len(missing)} weights of the model are not in this version, such as {missing[0]}",
            "the recipe's model is another than the one that was trained",
        )
    if other := sorted(name for name, tensor in own.items() if tensor.shape != known[name].shape):
        raise WeightsError(f"{other[0]} has another shape than the model's", "the recipe's model is another one")
    dtypes = {known[name].dtype for name in own if known[name].is_floating_point()}
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtype=dtypes.pop())
    model.load_state_dict({name: known[name] for name in own})


def _with_ties(model: PreTrainedModel, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors, also under the names of weights that are tied to one of them."""
    place = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    by_place = {place[name]: tensor for name, tensor in tensors.items() if name in place}
    return {**tensors, **{name: by_place[at] for name, at in place.items() if name not in tensors and at in by_place}}


def export_adapter(adapter: Adapter, model: str, target: Path) -> None:
    """A folder as peft writes it, for `PeftModel.from_pretrained` on `model`."""
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
    """`….q_proj.weight.lora_A` is `….q_proj.lora_A.weight` there."""
    weight, end = name[: -len(A)], name[-len(A) :]
    return f"{weight.removesuffix('.weight')}{end}.weight"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` once that is done. ConfigError when there is one."""
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
