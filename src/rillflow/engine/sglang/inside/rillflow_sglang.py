"""Weights of a running SGLang, changed in place and verified: a loader of its own (`--custom-weight-loader`).

SGLang calls `take` in every rank, between two steps of its scheduler. What to do stands in a file, since the call
itself carries tensors only; what came of it is written beside it. Invariants: an order is answered once by each rank;
nothing is raised, because SGLang's scheduler would end with it.

Where weights live, and how they are written and summed up, is `rillflow_weights`: it asks the model's own loader, which
SGLang's models have as vLLM's do. It is asked anew for every order: SGLang may lay weights out anew after each.
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
    """`layout`: the shapes of all published tensors, and their dtype."""
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
        return layout
    return getattr(worker, order["method"])(*order["arguments"])


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _write(path: Path, value: dict[str, Any]) -> None:
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value))
    half.replace(path)
