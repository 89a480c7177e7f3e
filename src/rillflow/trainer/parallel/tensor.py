"""Tensor parallel (`trainer.tensor_ranks`): the ranks of a team share the weights of every decoder layer.

The model's own plan (`base_model_tp_plan` of transformers) says how. Each rank holds some rows of a `colwise` layer,
which are its outputs; in attention these are whole heads. Behind it the rank holds those columns of a `rowwise` layer
that take these inputs, and its results are added up over the team: all ranks have the same hidden states. Embedding,
norms and head are whole on every rank. A team's ranks read the same rows, and each scores its share of the trained
tokens, as with context parallel (`context`).

Gradients: backward begins on each rank at its own share of the scores, and adding up is its own adjoint. So what a rank
finds for a weight that is whole is a part of the gradient, and the sum over all ranks is the gradient. What it finds
for its part of a weight is complete, and is added up over teams only.

Outside of a step a part is seen as rows of the weight (`rows_of`), as FSDP's shards are: so checkpoints and
publications do not depend on how a model was shared.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.attention import decoder
from rillflow.trainer.parallel import Peers, share
from rillflow.trainer.parallel.context import group_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DIMENSIONS = {"colwise": 0, "rowwise": 1}
# Norms of single heads, and layers whose results or inputs every rank needs whole: each rank computes all of them.
_WHOLE = ("replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input")
_HINT = "set trainer.tensor_ranks: 1, and sharding: fsdp to spread the weights"


class Part(nn.Parameter):
    """A rank's part of a weight of `shape_whole`: some of its rows (`cut` 0) or columns (1). The `mesh` has teams and
    the ranks of a team."""

    cut: int
    shape_whole: torch.Size
    mesh: DeviceMesh

    @property
    def ranks(self) -> int:
        return self.mesh.size(1)


def split(
    model: PreTrainedModel, config: TrainerConfig, peers: Peers, group: str, device: torch.device
) -> PreTrainedModel:
    """Keep this rank's part of a model that is the same on every rank, on `device`. `group` is that of its team."""
    ranks = config.tensor_ranks
    if ranks == 1 or peers.size == 1:
        return model
    mesh = init_device_mesh(device.type, (peers.size // ranks, ranks), mesh_dim_names=("teams", "ranks"))
    for module, dim in _planned(model, ranks):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if dim == 0 or parameter.ndim == 2:  # the bias of a rowwise layer is added once, to the sum
                setattr(module, name, _part(parameter, dim, mesh))
        if dim == 1:
            module.forward = partial(_added_up, module, group)
    return model.to(device)


def _planned(model: PreTrainedModel, ranks: int) -> list[tuple[Any, int]]:
    """Return the layers that are split, and along which dimension. ConfigError where the plan has others."""
    body = decoder(model)
    kind, plan = type(model).__name__, getattr(body.config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(f"transformers has no tensor parallel plan for {kind}", _HINT)
    found: list[tuple[Any, int]] = []
    for name, module in body.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style in (None, *_WHOLE) or isinstance(module, nn.Embedding):
            continue
        if style not in _DIMENSIONS or type(module) is not nn.Linear:
            raise ConfigError(f"ranks cannot share {name} of {kind}, whose plan is {style}", _HINT)
        dim = _DIMENSIONS[style]
        if module.weight.shape[dim] % ranks:
            raise ConfigError(f"{ranks} ranks cannot share the {module.weight.shape[dim]} features of {name}", _HINT)
        found.append((module, dim))
    if not found:
        raise ConfigError(f"ranks cannot share any layer of {kind} by its tensor parallel plan", _HINT)
    return found


def _part(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> Part:
    first, last = share(parameter.shape[dim], mesh.get_local_rank(1), mesh.size(1))
    held = parameter.detach().narrow(dim, first, last - first).clone()
    part: Part = Part(held, requires_grad=parameter.requires_grad)
    part.cut, part.shape_whole, part.mesh = dim, parameter.shape, mesh
    return part


# ---------------------------------------------------------------- a step


def _added_up(module: nn.Linear, group: str, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _add_up(linear(x, module.weight), group)
    return made if module.bias is None else made + module.bias


@torch.library.custom_op("rillflow::add_up", mutates_args=())
def _add_up(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum over the ranks of a team, the same bits on each."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_of(group))
    return total


@_add_up.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.rillflow.add_up(grad, ctx.group), None


_add_up.register_autograd(_differentiate, setup_context=_keep)


def add_over_teams(part: Part, gradient: torch.Tensor) -> None:
    """Replace the gradient of a part by its sum over all teams. Collective."""
    if part.mesh.size(0) > 1:
        dist.all_reduce(gradient, group=part.mesh.get_group(0))


# ---------------------------------------------------------------- outside of a step


def rows_of(held: torch.Tensor, part: Part) -> DTensor:
    """Return a tensor that is split as a part is (weights, a moment) as one whose rows are split. Collective."""
    return _placed(held, part, part.cut).redistribute(placements=[Replicate(), Shard(0)])


def held_of(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """Return what this rank holds, from its rows: the inverse of `rows_of`. Collective."""
    made: torch.Tensor = _placed(rows, part, 0).redistribute(placements=[Replicate(), Shard(part.cut)]).to_local()
    return made


def _placed(local: torch.Tensor, part: Part, dim: int) -> DTensor:
    like = torch.empty(part.shape_whole, device="meta")
    return DTensor.from_local(
        local, part.mesh, [Replicate(), Shard(dim)], run_check=False, shape=like.shape, stride=like.stride()
    )
