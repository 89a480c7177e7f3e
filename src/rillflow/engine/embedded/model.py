"""Copying weights into a model in place.

Invariant: weights are checked completely before the first one is copied; a refused set changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from rillflow.errors import WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Tensors


class WeightSlots:
    """The model's tensors by name. Names that share a tensor (tied weights) are one entry: any of them will do."""

    def __init__(self, model: PreTrainedModel) -> None:
        names: dict[int, list[str]] = defaultdict(list)
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
        self._entries = [(tuple(names[key]), tensor) for key, tensor in tensors.items()]
        self._known = {name for aliases, _ in self._entries for name in aliases}

    @torch.inference_mode()
    def copy(self, tensors: Tensors) -> None:
        """Copy a full set of weights in place, or raise WeightsError and leave the old ones as they were."""
        for target, source in self._matched(tensors):
            target.copy_(source, non_blocking=True)

    def _matched(self, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        unknown = sorted(set(tensors) - self._known)
        if unknown:
            raise WeightsError(f"weights not in the model: {_some(unknown)}", "is it the same architecture?")
        missing = [aliases[0] for aliases, _ in self._entries if not any(name in tensors for name in aliases)]
        if missing:
            raise WeightsError(f"weights missing: {_some(missing)}", "give the full set of weights")
        pairs = []
        for aliases, target in self._entries:
            given = [(name, tensors[name]) for name in aliases if name in tensors]
            for name, source in given:
                _check_fit(name, source, target)
            if any(not torch.equal(source, given[0][1]) for _, source in given[1:]):
                raise WeightsError(f"{' and '.join(aliases)} are tied in the model but differ", "untie the model")
            pairs.append((target, given[0][1]))
        return pairs


def _check_fit(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if source.shape != target.shape:
        raise WeightsError(
            f"{name} has shape {tuple(source.shape)}, the model {tuple(target.shape)}", "is it the same size?"
        )
    if source.dtype != target.dtype:
        raise WeightsError(
            f"{name} is {source.dtype}, the model {target.dtype}", "publish weights in the engine's dtype"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
