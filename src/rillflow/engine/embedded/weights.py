"""Copying weights into a model in place: all of them, or those that have changed.

Invariant: weights are checked completely before the first one is copied; a refused set changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from rillflow.errors import WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Change, Patch, Tensors


class Write(NamedTuple):
    """Values on the model's device, and where they go: places in `memory`, or with None all of it."""

    memory: torch.Tensor
    place_K: torch.Tensor | None
    value_K: torch.Tensor


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
    def prepare(self, patch: Patch) -> list[Write]:
        """A patch as writes into this model's memory, checked; WeightsError when it does not fit. Nothing is changed,
        so this may run while the model is in use."""
        self._refuse_unknown(patch.changes)
        writes = []
        for aliases, target in self._entries:
            given = [(name, patch.changes[name]) for name in aliases if name in patch.changes]
            for name, change in given:
                _check_change(name, change, target)
            if any(not _same(change, given[0][1]) for _, change in given[1:]):
                raise _differ(aliases)
            if given:
                writes.append(_write(target, given[0][1]))
        return writes

    @torch.inference_mode()
    def write(self, writes: Sequence[Write]) -> None:
        for memory, place_K, value_K in writes:
            if place_K is None:
                memory.copy_(value_K)
            else:
                memory[place_K] = value_K

    @torch.inference_mode()
    def copy(self, tensors: Tensors) -> None:
        """Copy a full set of weights in place, or raise WeightsError and leave the old ones as they were."""
        for target, source in self._matched(tensors):
            target.copy_(source, non_blocking=True)

    def _matched(self, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._refuse_unknown(tensors)
        missing = [aliases[0] for aliases, _ in self._entries if not any(name in tensors for name in aliases)]
        if missing:
            raise WeightsError(f"weights missing: {_some(missing)}", "give the full set of weights")
        pairs = []
        for aliases, target in self._entries:
            given = [(name, tensors[name]) for name in aliases if name in tensors]
            for name, source in given:
                _check_fit(name, source, target)
            if any(not torch.equal(source, given[0][1]) for _, source in given[1:]):
                raise _differ(aliases)
            pairs.append((target, given[0][1]))
        return pairs

    def _refuse_unknown(self, names: Collection[str]) -> None:
        unknown = sorted(set(names) - self._known)
        if unknown:
            raise WeightsError(f"weights not in the model: {_some(unknown)}", "is it the same architecture?")


def _write(target: torch.Tensor, change: Change) -> Write:
    value_K = change.value_K.to(target.device)
    if change.index_K is None:
        return Write(target, None, value_K.view(target.shape))
    index_K = change.index_K.to(target.device)
    if target.is_contiguous():
        return Write(target.view(-1), index_K, value_K)
    # A view into a fused matrix: the flat tensor's places, as places in the memory that it is a view of.
    place_K = torch.zeros_like(index_K)
    for size, stride in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        place_K += index_K % size * stride
        index_K = index_K // size
    extent = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return Write(target.as_strided((extent,), (1,)), place_K, value_K)


def _same(one: Change, other: Change) -> bool:
    if one.index_K is None or other.index_K is None:
        return one.index_K is other.index_K and torch.equal(one.value_K, other.value_K)
    return torch.equal(one.index_K, other.index_K) and torch.equal(one.value_K, other.value_K)


def _check_change(name: str, change: Change, target: torch.Tensor) -> None:
    index_K, value_K = change
    if value_K.dtype != target.dtype:
        raise WeightsError(
            f"{name} changes to {value_K.dtype}, the model is {target.dtype}", "publish weights in the engine's dtype"
        )
    wanted = target.numel() if index_K is None else index_K.numel()
    fits = value_K.numel() == wanted
    if index_K is not None and len(index_K):
        # On a GPU a place outside of the tensor would end the process.
        fits = fits and index_K.dtype == torch.int64 and 0 <= int(index_K[0]) <= int(index_K[-1]) < target.numel()
        fits = fits and bool((index_K[1:] > index_K[:-1]).all())
    if not fits:
        raise WeightsError(f"the change of {name} does not fit the model", "is it the same size?")


def _differ(aliases: Sequence[str]) -> WeightsError:
    return WeightsError(f"{' and '.join(aliases)} are tied in the model but differ", "untie the model")


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
