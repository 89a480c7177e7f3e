"""Layers of the Llama family on a CPU, in fp32: one pass over memory each way, by compiled loops.

The library writes norms, gates and rotations as a dozen operators, each of which reads and writes all activations: in a
small model they take half as long as the matrix products. The results are the same within float rounding.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rillflow.trainer.fused.gates import gated
from rillflow.trainer.fused.heads import attended
from rillflow.trainer.fused.norms import norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILY = ("Llama", "Qwen2", "Qwen3")
_NORMS, _GATED, _ATTENTION = ({name + kind for name in _FAMILY} for kind in ("RMSNorm", "MLP", "Attention"))
_SILU = {"SiLU", "SiLUActivation"}


def fuse(model: PreTrainedModel) -> None:
    """In place, the modules that are known."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            module.forward = partial(norm, module)
        elif kind in _GATED and type(module.act_fn).__name__ in _SILU:
            module.forward = partial(gated, module)
        elif kind in _ATTENTION:
            module.forward = partial(attended, module)
