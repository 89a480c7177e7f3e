"""Loads a model that is sharded over ranks without any rank holding all of it: each reads its own rows of every tensor.

The model is made without memory (on the meta device), sharded, given memory for its shards, and filled from the files
of its folder. Buffers that no file has (rotary tables) are computed again from the config. A model whose files have
other names or shapes than its parameters, such as one tensor for each expert, cannot be read by rows: `load_shards`
returns None, and the caller loads it whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from rillflow.errors import ConfigError
from rillflow.trainer.parallel.peers import Peers, share
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_FILES = "*.safetensors"


def load_shards(
    name: str, shard: Callable[[PreTrainedModel], None], peers: Peers, device: torch.device
) -> PreTrainedModel | None:
    """Return the causal language model of a folder, in fp32, sharded by `shard` onto `device`, or None."""
    folder = model_folder(name)
    if not folder.is_dir():  # a name of the hub: the library finds its files
        return None
    model, files = _empty(folder), _index(folder)
    if why := _unreadable(model, files):
        log.info("%s is loaded whole on every rank: %s", name, why)
        return None
    shard(model)
    tables = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    model.to_empty(device=device)
    model.tie_weights()  # each module was given memory of its own
    _compute_again(model, tables, device)
    _fill(model, files, peers)
    return model.eval()


def _empty(folder: Path) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    return model


def _index(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of every tensor of the folder, from the files' headers."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob(_FILES)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[name] = (path, tuple(file.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {error}", "download the model again") from error
    return found


def _unreadable(model: PreTrainedModel, files: dict[str, tuple[Path, tuple[int, ...]]]) -> str:
    """Return why the files cannot be read by rows; empty if they can."""
    for name, parameter in model.named_parameters():
        if name not in files:
            return f"its files have no {name}"
        if files[name][1] != tuple(parameter.shape):
            return f"{name} has another shape in its files"
    tables = [name for name, _ in model.named_buffers() if _owner(model, name)[1] is None]
    return f"{tables[0]} cannot be computed again" if tables else ""


def _owner(model: PreTrainedModel, name: str) -> tuple[Any, type | None]:
    """Return the module of a buffer, and its class if the module can be made again from the config alone."""
    module = model.get_submodule(name.rpartition(".")[0])
    kind = type(module)
    return module, kind if kind.__name__.endswith("RotaryEmbedding") else None


def _compute_again(model: PreTrainedModel, tables: set[str], device: torch.device) -> None:
    for name in tables:
        module, kind = _owner(model, name)
        assert kind is not None, "checked before"
        fresh = kind(config=model.config.get_text_config())
        own = name.rpartition(".")[2]
        setattr(module, own, getattr(fresh, own).to(device))


@torch.no_grad()
def _fill(model: PreTrainedModel, files: dict[str, tuple[Path, tuple[int, ...]]], peers: Peers) -> None:
    """Copy this rank's rows of every parameter; tied ones are one parameter."""
    by_file: dict[Path, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        by_file.setdefault(files[name][0], {})[name] = parameter
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name, parameter in wanted.items():
                rows = file.get_slice(name)
                if isinstance(parameter, DTensor):
                    first, last = share(parameter.shape[0], peers.rank, peers.size)
                    parameter.to_local().copy_(rows[first:last])
                else:
                    parameter.copy_(rows[:])
