"""The code that runs inside SGLang: a loader that changes its weights in place and verifies them
(`--custom-weight-loader`), and the cuts of `top_k` and `top_p` (`--enable-custom-logit-processor`). The loader's first
order also wraps the sampler, which then returns the model's own log-probs too (`rillflow_logprobs`).

SGLang calls `take` in every rank, between two steps of its scheduler. The order is in a file, since the call itself
carries tensors only; the answer is written beside it. Invariants: an order is answered once by each rank; no error is
raised, because it would end SGLang's scheduler.

`rillflow_weights` finds, writes and verifies the weights: it uses the model's own loader, which SGLang's models have as
vLLM's do. It does so for every order: SGLang may change the layout of weights after each.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ORDERS = "RILLFLOW_ORDERS"  # the folder that orders come through
_ORDER = "order.json"


def answer_name(number: int, rank: int) -> str:
    return f"answer-{number}-{rank}.json"


def write_order(folder: Path, number: int, layout: list[Any], method: str, arguments: list[Any]) -> None:
    """`layout`: the shapes of all published tensors, their dtype, and the pieces that checkpoints name otherwise."""
    order = {"number": number, "layout": layout, "method": method, "arguments": arguments}
    _write(folder / _ORDER, order)


def take(model: torch.nn.Module, named_tensors: Any) -> None:
    """Called by SGLang; `named_tensors` is empty."""
    folder = Path(os.environ[ORDERS])
    order = json.loads((folder / _ORDER).read_text())
    try:
        answer: dict[str, Any] = {"result": _carried_out(model, order)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    _write(folder / answer_name(order["number"], _rank()), answer)


def _carried_out(model: torch.nn.Module, order: dict[str, Any]) -> Any:
    # By its name: it is on the path inside SGLang only.
    worker = importlib.import_module("rillflow_weights").RillflowWorker()
    worker.model_runner = SimpleNamespace(model=model)
    layout = worker.rillflow_layout(*order["layout"])
    if order["method"] == "rillflow_layout":
        importlib.import_module("rillflow_logprobs").wrap_sglang_sampler()
        return layout
    return getattr(worker, order["method"])(*order["arguments"])


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _write(path: Path, value: dict[str, Any]) -> None:
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value))
    half.replace(path)


class Cuts:
    """Cuts logits to what `top_k` and `top_p` leave of the tempered distribution, before SGLang draws.

    SGLang is asked to draw from all that is left, so that the log-probs that it tells are of what was drawn from; its
    own cuts come after its log-probs. First the likeliest `top_k`, then of these the share `top_p`, as with the other
    engines.
    """

    def __call__(self, logits: torch.Tensor, asked: list[dict[str, Any]]) -> torch.Tensor:
        """`asked` are the `custom_params` of each row's request: `temperature`, `top_k` (0: all) and `top_p`."""

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([one[name] for one in asked], dtype=dtype, device=logits.device)[:, None]

        sorted_RV, order_RV = (logits.float() / column("temperature", torch.float32)).sort(-1, descending=True)
        size, top_k = logits.shape[-1], column("top_k", torch.int64)
        last = torch.where(top_k > 0, top_k.clamp(max=size), size) - 1
        sorted_RV = sorted_RV.masked_fill(sorted_RV < sorted_RV.gather(-1, last), -torch.inf)
        share_RV = sorted_RV.softmax(-1)
        before_RV = share_RV.cumsum(-1) - share_RV  # the share of those that are likelier
        top_p = column("top_p", torch.float32)
        gone_RV = ((before_RV >= top_p) & (top_p < 1.0)) | sorted_RV.isneginf()
        gone_RV[:, 0] = False
        return logits.masked_fill(torch.zeros_like(gone_RV).scatter(-1, order_RV, gone_RV), -torch.inf)
