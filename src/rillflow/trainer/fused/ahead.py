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
    """On ones and zeros: nothing is drawn, for the process's random numbers are others'."""
    from rillflow.trainer.attention.loops import attention
    from rillflow.trainer.attention.spans import Heads
    from rillflow.trainer.fused.gates import gate
    from rillflow.trainer.fused.heads import turned
    from rillflow.trainer.fused.norms import normed
    from rillflow.trainer.softmax import shared_, summed

    rows_PD, weight_D = torch.ones(8, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    heads = turned(normed(rows_PD, weight_D, 1e-6).view(8, 1, 8), (weight_D, 1e-6), torch.ones(8, 8), torch.ones(8, 8))
    found = attention(Heads(heads, heads, heads), torch.tensor([[0, 8, 0, 8]]), 1.0)
    gate(found, found).sum().backward()  # type: ignore[no-untyped-call]
    logits_TV, factor_T = torch.zeros(8, 16), torch.ones(8)
    _, total_T, _ = summed(logits_TV, torch.arange(8), factor_T)
    shared_(logits_TV, factor_T, total_T)
