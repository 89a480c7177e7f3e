"""What is known of a policy's weights before any of them is there: names, shapes, dtype, and which names are one.

Invariant: what passes `whole` or `changes` fits the model; each shared tensor is in it once, under its first name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rillflow.errors import ConfigError, WeightsError
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import DTYPES, Dtype

if TYPE_CHECKING:
    from rillflow.contracts import Change, Patch, Tensors

_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelFacts:
    """A model as its published weights are named: `aliases` has, for every name, the first one of the same tensor."""

    folder: Path
    dtype: Dtype
    vocabulary: int
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    def whole(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """All weights, each tensor once; WeightsError when they are not those of this model."""
        self._refuse_unknown(tensors)
        given = self._once(tensors, torch.equal)
        missing = sorted(set(self.shapes) - set(given))
        if missing:
            raise WeightsError(f"weights missing: {_some(missing)}", "give the full set of weights")
        for name, tensor in given.items():
            self._check_dtype(name, tensor)
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)}, the model {self.shapes[name]}", "is it the same size?"
                )
        return given

    def changes(self, patch: Patch) -> dict[str, Change]:
        """What a patch changes, each tensor once; WeightsError when it does not fit this model."""
        self._refuse_unknown(patch.changes)
        given = self._once(patch.changes, _same)
        for name, change in given.items():
            self._check_dtype(name, change.value_K)
            size = torch.Size(self.shapes[name]).numel()
            index_K = change.index_K
            count = size if index_K is None else len(index_K)
            inside = index_K is None or not count or (int(index_K[0]) >= 0 and int(index_K[-1]) < size)
            if change.value_K.numel() != count or not inside:
                raise WeightsError(f"the changes of {name} do not fit into its {size} weights", "is it the same size?")
        return given

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        unknown = sorted(set(names) - set(self.aliases))
        if unknown:
            raise WeightsError(f"weights not in the model: {_some(unknown)}", "is it the same architecture?")

    def _once(self, given: Mapping[str, _T], same: Callable[[_T, _T], bool]) -> dict[str, _T]:
        once: dict[str, _T] = {}
        for name, value in given.items():
            first = self.aliases[name]
            if first in once and not same(once[first], value):
                raise WeightsError(f"{first} and {name} are tied in the model but differ", "untie the model")
            once[first] = value
        return once

    def _check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype != DTYPES[self.dtype]:
            raise WeightsError(
                f"{name} is {tensor.dtype}, the model {DTYPES[self.dtype]}", "publish weights in the engine's dtype"
            )


def model_facts(name: str, dtype: Dtype) -> ModelFacts:
    """From the model's configuration alone: no weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(name)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a damaged file makes the libraries raise anything
        raise ConfigError(
            f"cannot read the configuration of {name}: {error}", "the folder must hold a config.json"
        ) from error
    groups: dict[int, list[str]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        groups[id(tensor)].append(key)
        shapes[key] = tuple(tensor.shape)
    aliases = {key: keys[0] for keys in groups.values() for key in keys}
    once = {key: shapes[key] for key in dict.fromkeys(aliases.values())}
    return ModelFacts(folder, dtype, config.get_text_config().vocab_size, once, aliases)


def _same(left: Change, right: Change) -> bool:
    if left.index_K is None or right.index_K is None:
        return left.index_K is right.index_K and torch.equal(left.value_K, right.value_K)
    return torch.equal(left.index_K, right.index_K) and torch.equal(left.value_K, right.value_K)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
