"""What fused layers use is compiled at its first use: for ten seconds, or for a moment where the machine code was kept.
So it is used once while the first batch is waited for.
"""

from __future__ import annotations

import logging
import threading
from functools import cache

import torch

log = logging.getLogger(__name__)


@cache
def compile_ahead() -> threading.Thread:
    """In a thread of its own, once in a process, with which it ends. Who needs the code meanwhile waits for it."""
    thread = threading.Thread(target=_rehearse, name="layers", daemon=True)
    thread.start()
    return thread


def _rehearse() -> None:
    try:
        _use()
    except Exception:
        log.warning("the loops of the layers could not be prepared", exc_info=True)


def _use() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rillflow.trainer.attention import LOOPS, hidden_states
    from rillflow.trainer.fused import fuse
    from rillflow.trainer.layout import Layout
    from rillflow.trainer.softmax import shared_, summed

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    fuse(model)
    token_P, start_S = torch.arange(8), torch.zeros(1, dtype=torch.int64).numpy()
    hidden_PD = hidden_states(model, Layout(token_P, token_P, start_S, start_S + 8, start_S - 1), LOOPS)
    hidden_PD.sum().backward()
    factor_T = torch.ones(8)
    _, total_T, _ = summed(logits_TV := torch.zeros(8, 16), token_P, factor_T)
    shared_(logits_TV, factor_T, total_T)
