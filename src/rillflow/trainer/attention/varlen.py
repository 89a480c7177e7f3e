"""The kernel for NVIDIA GPUs: flash attention over spans of any length, in half precision.

These are the operators below `torch.nn.attention.varlen`. They are called directly, because joined passes need their
backward with the log-sum-exp of all passes.
"""

from __future__ import annotations

import torch

from rillflow.trainer.attention.spans import Found, Heads, Spans


class Flash:
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found:
        edges = (spans.query_edges, spans.key_edges, spans.query_most, spans.key_most)
        out, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            *heads, *edges, 0.0, spans.causal, return_debug_mask=False, scale=scale
        )
        return Found(out, lse_HQ.t().contiguous())

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        edges = (spans.query_edges, spans.key_edges, spans.query_most, spans.key_most)
        found = (whole.out, whole.lse.t().contiguous())
        # Only dropout, which is off, reads the random state.
        state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad, *heads, *found, *edges, 0.0, spans.causal, state, state, scale=scale
        )
        return Heads(*grads)
