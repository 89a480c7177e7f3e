"""Layers of the Llama family on a CPU in fp32, computed by `kernels.layers`.

The library writes norms, gates and rotary embeddings as a dozen operators, each of which reads and writes all
activations. The results are the same within float rounding.
"""

from __future__ import annotations

import logging
import threading
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from rillflow import kernels
from rillflow.kernels import layers
from rillflow.trainer.attention import asked
from rillflow.trainer.attention.forest import Packed
from rillflow.trainer.attention.kernels import Heads
from rillflow.trainer.parallel.context import Exchanging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_FAMILY = ("Llama", "Qwen2", "Qwen3")
_NORMS, _GATED, _ATTENTION = ({name + kind for name in _FAMILY} for kind in ("RMSNorm", "MLP", "Attention"))
_SILU = {"SiLU", "SiLUActivation"}


def fuse(model: PreTrainedModel) -> None:
    """Replace the forward of the modules that are known, in place."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            module.forward = partial(_norm, module)
        elif kind in _GATED and type(module.act_fn).__name__ in _SILU:
            module.forward = partial(_gated, module)
        elif kind in _ATTENTION:
            module.forward = partial(_attended, module)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return layers.rms_norm(x, module.weight, module.variance_epsilon)
    made: torch.Tensor = type(module).forward(module, x)  # a model may be cast after it was fused
    return made


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor
    if x.dtype == torch.float32:
        made = module.down_proj(layers.gate(module.gate_proj(x), module.up_proj(x)))
    else:
        made = type(module).forward(module, x)
    return made


def _attended(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    packed: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of packed rows; everything else is left to the module. The arguments have the library's names.

    Queries and keys stay where the projections put them, token by token: they are normed and rotated there."""
    cos_1PD, sin_1PD = position_embeddings
    if not _ours(module, hidden_states, cos_1PD, packed, options):
        theirs: tuple[torch.Tensor, None] = type(module).forward(
            module, hidden_states=hidden_states, position_embeddings=position_embeddings,
            attention_mask=attention_mask, packed=packed, **options,
        )  # fmt: skip
        return theirs
    wanted = asked(module, module.attention_dropout if module.training else 0.0, vars(module))
    shape = (hidden_states.shape[1], -1, module.head_dim)
    query, key, value = (part(hidden_states).view(shape) for part in (module.q_proj, module.k_proj, module.v_proj))
    query = layers.rotate(query, _norm_of(module, "q_norm"), cos_1PD[0], sin_1PD[0])
    key = layers.rotate(key, _norm_of(module, "k_norm"), cos_1PD[0], sin_1PD[0])
    found = packed(Heads(query, key, value), module.scaling, wanted)
    return module.o_proj(found.reshape(1, len(found), -1)), None


def _ours(module: Any, hidden: torch.Tensor, cos: torch.Tensor, packed: Any, options: dict[str, Any]) -> bool:
    joined = isinstance(packed, Packed | Exchanging) and options.get("past_key_values") is None
    plain = hidden.dtype == cos.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return joined and plain and len(hidden) == 1 and cos.shape[-1] == module.head_dim


def _norm_of(module: Any, name: str) -> tuple[torch.Tensor | None, float]:
    norm = getattr(module, name, None)
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


# ------------------------------------------------------------ compiling ahead


@cache
def compile_ahead() -> threading.Thread:
    """Compile all kernels of a step in a thread, once in a process, while the first batch is waited for.

    It takes ten seconds, or a moment where the machine code was kept. The process waits for the thread at its end: a
    daemon thread inside torch would abort it."""
    thread = threading.Thread(target=_prepare, name="layers")
    thread.start()
    return thread


def _prepare() -> None:
    try:
        with kernels.one_compiles():
            _use()
    except Exception:
        log.warning("the kernels of the layers could not be prepared", exc_info=True)


def _use() -> None:
    """Call each kernel on ones and zeros: random numbers of the process are not touched."""
    rows_PD, weight_D = torch.ones(8, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    turns = torch.ones(8, 8), torch.ones(8, 8)
    heads = layers.rotate(layers.rms_norm(rows_PD, weight_D, 1e-6).view(8, 1, 8), (weight_D, 1e-6), *turns)
    layers.gate(heads, heads).sum().backward()  # type: ignore[no-untyped-call]
