"""Models that are sharded over the ranks (FSDP2), also while they are loaded.

Every decoder layer is gathered when it computes and resharded afterwards; the rest (embeddings, the last norm, the
head) is gathered for the whole pass, so tied embeddings stay one weight. Gradients are summed over ranks, never
averaged: the learner scales them. Every rank runs the same number of passes.

With `trainer.copies` k the ranks hold k copies of the sharded model (HSDP): ranks 0 to n - 1 the shards of the first,
the next n those of the second. Gradients are reduced after every backward pass, so that no rank ever holds a whole one.
With `trainer.accumulate: whole` every rank adds up a whole gradient and reduces it once (`reduce_gradients`).

The masters are the fp32 shards. In bf16 each weight is cast when it is gathered, and gradients are reduced in fp32.

`load_shards` loads a model without any rank holding all of it. The model is made without memory (on the meta device),
sharded, given memory for its shards, and filled from the files of its folder, of which each rank reads its own rows.
Buffers that no file has (rotary tables) are computed again from the config. A model whose files have other names or
shapes than its parameters, such as one tensor for each expert, cannot be read by rows: `load_shards` returns None, and
the caller loads it whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.parallel import Alone, Peers, share
from rillflow.weights.codec import tensor_facts
from rillflow.weights.delta_file import Part, can_begin
from rillflow.weights.manifest import TensorFacts
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Tensors


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_ENTRY = "rillflow_entry_{}"
_PIECE = 16 << 20  # bytes of a tensor that are gathered at once
_FILES = "*.safetensors"


def shard(model: PreTrainedModel, config: TrainerConfig, peers: Peers, device: torch.device | None = None) -> None:
    """Shard a model that is the same on every rank onto `device`, if the recipe asks for it and the ranks are
    connected.

    Its trainable parameters must be fp32.
    """
    if config.sharding == "none" or (isinstance(peers, Alone) and peers.size == 1):
        return
    if any(parameter.requires_grad and parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ConfigError("a model to be sharded must be loaded in fp32", "load it in fp32: its shards are the masters")
    device = device or next(model.parameters()).device
    if peers.size % config.copies:
        raise ConfigError(
            f"{peers.size} ranks cannot hold {config.copies} copies of a sharded model",
            "set trainer.ranks to a multiple of trainer.copies",
        )
    axes = {"copies": config.copies, "shards": peers.size // config.copies}
    if config.copies == 1:
        del axes["copies"]
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums: gloo supports no other reduction.
            module.set_force_sum_reduction_for_comms(True)


def entered(model: nn.Module, run: Callable[P, T]) -> Callable[P, T]:
    """Return `run` as a forward pass of the model itself: inside, the weights of a sharded model are gathered.

    Backward must begin at its result.
    """
    if not isinstance(model, FSDPModule):
        return run
    name = next(name for number in range(1 << 16) if not hasattr(model, name := _ENTRY.format(number)))
    setattr(model, name, run)
    register_fsdp_forward_method(model, name)

    def entry(*args: P.args, **kwargs: P.kwargs) -> T:
        given: T = getattr(model, name)(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(given)):
            model.reshard()  # no backward pass will: gathered weights would outlive the next update
        return given

    return entry


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Decide whether backward passes from here on reduce the gradients, with all that was added up before, or only add
    to them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


class ShardPlace(NamedTuple):
    """Which shard of a tensor a rank holds, of how many, and in which copy of the model."""

    shard: int
    shards: int
    copy: int

    def rows(self, count: int) -> tuple[int, int]:
        """Return the first of the shard's rows and the row after its last."""
        return share(count, self.shard, self.shards)


def shard_place(tensor: object, rank: int, ranks: int) -> ShardPlace:
    """Return this rank's place; that of a tensor which is not sharded is as if it were, over all ranks."""
    if not isinstance(tensor, DTensor):
        return ShardPlace(rank, ranks, 0)
    mesh = tensor.device_mesh
    copy = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    return ShardPlace(mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), copy)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that a decoder repeats, in order."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if found:
        return found
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


class Shards(NamedTuple):
    """One rank's `parts` of a model's tensors, as they are trained, until the next update; `tensors` and `aliases`
    describe the whole model as it is published."""

    parts: dict[Part, torch.Tensor]
    tensors: dict[str, TensorFacts]
    aliases: dict[str, str]


def shards_of(tensors: Tensors, aliases: Mapping[str, str], dtype: torch.dtype, peers: Peers) -> Shards:
    """Return this rank's part of each tensor; the ranks of the first copy have them. Rank 0 has tensors that are not
    sharded, and tensors whose shards in `dtype` do not begin at multiples of 8 bytes, which all ranks gather
    together."""
    parts: dict[Part, torch.Tensor] = {}
    for name, tensor in tensors.items():
        first, mine = _own(tensor, dtype, peers)
        if mine.numel():
            parts[Part(name, first, mine.numel())] = mine
    facts = {name: tensor_facts(tensor, dtype) for name, tensor in tensors.items()}
    return Shards(parts, facts, dict(aliases))


def _own(tensor: torch.Tensor, dtype: torch.dtype, peers: Peers) -> tuple[int, torch.Tensor]:
    """Return the place of the first weight of this rank's part, and the part."""
    if isinstance(tensor, DTensor):
        row = math.prod(tensor.shape[1:])
        place = shard_place(tensor, peers.rank, peers.size)
        firsts = [share(tensor.shape[0], shard, place.shards)[0] * row for shard in range(place.shards)]
        if all(can_begin(first, dtype.itemsize) for first in firsts):
            mine = tensor.to_local()
            return firsts[place.shard], mine if place.copy == 0 else mine.new_empty(0)
        tensor = whole(tensor, dtype, here=peers.rank == 0).to(tensor.to_local().device)
    return 0, tensor if peers.rank == 0 else tensor.new_empty(0)


def whole(tensor: torch.Tensor, dtype: torch.dtype, *, here: bool = True) -> torch.Tensor:
    """Return the full tensor of a shard in `dtype`, which all ranks must ask for together; others are cast alone.

    It is new, in host memory, and travels in pieces: besides it no rank holds more than one piece. A rank that does not
    need it (`here` False) takes part and gets an empty tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    place, local, shape = shard_place(tensor, 0, 1), tensor.to_local(), tensor.shape
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    full = torch.empty(shape if here else (0,), dtype=dtype)
    step = max(1, _PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for shard in range(place.shards):
        first, last = share(shape[0], shard, place.shards)
        for row in range(first, last, step):
            rows = slice(row, min(row + step, last))
            if shard == place.shard:
                piece = local[row - first : rows.stop - first].to(dtype).contiguous()
            else:
                piece = local.new_empty((rows.stop - row, *shape[1:]), dtype=dtype)
            dist.broadcast(piece, group=group, group_src=shard)
            if here:
                full[rows].copy_(piece)
    return full


# ---------------------------------------------------------------- loading


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
                    first, last = shard_place(parameter, peers.rank, peers.size).rows(parameter.shape[0])
                    parameter.to_local().copy_(rows[first:last])
                else:
                    parameter.copy_(rows[:])
