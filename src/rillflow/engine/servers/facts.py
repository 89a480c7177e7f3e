"""The published weights of a model: names, shapes, dtype and tied names, known before any weight is read; and the
layout of these weights in a server's workers, checked and added up over ranks.

Invariants: weights that pass `whole` or `changes` fit the model, and a shared tensor is in them once, under its first
name. Parts of a tensor that several ranks hold alike count once, and only if they are the same on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rillflow.engine.experts import routers_of
from rillflow.errors import ConfigError, WeightsError
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import DTYPES, Dtype

if TYPE_CHECKING:
    from rillflow.contracts import Change, Patch, Tensors

_T = TypeVar("_T")
_HINT = "weights are changed in place: serve the model unquantised, in the dtype that is published"


class Piece(NamedTuple):
    """A part of a published tensor, and its name in a checkpoint."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A model as its published weights are named: `aliases` has, for every name, the first one of the same tensor.
    `router_layers` are the numbers of the layers that have a router of experts. `pieces` are those of the tensors that
    checkpoints name otherwise, such as stacks of experts, which they have expert by expert."""

    folder: Path
    dtype: Dtype
    vocabulary: int
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    router_layers: tuple[int, ...] = ()
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)

    def whole(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return all weights, each tensor once. Raise WeightsError when they are not those of this model."""
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
        """Return the changes of a patch, each tensor once. Raise WeightsError when it does not fit this model."""
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
    """Read the facts from the model's configuration; no weight is read."""
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
    tensors = model.state_dict(keep_vars=True)
    for key, tensor in tensors.items():
        groups[id(tensor)].append(key)
    aliases = {key: keys[0] for keys in groups.values() for key in keys}
    once = {key: tensors[key].detach() for key in dict.fromkeys(aliases.values())}
    shapes = {key: tuple(tensor.shape) for key, tensor in once.items()}
    routers = {id(router) for router in routers_of(model)}
    layers = tuple(_layer(name) for name, module in model.named_modules() if id(module) in routers)
    pieces = _pieces(model, once)
    return ModelFacts(folder, dtype, config.get_text_config().vocab_size, shapes, aliases, layers, pieces)


class _CopiesShare(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets copies of tensors without data share their storage: it tells which part of which tensor a copy is."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.clone.default:
            return args[0]
        if function is torch.ops.aten._unsafe_view.default:  # of a copy in another order, which was not made
            return args[0].new_empty(args[1])
        return function(*args, **(kwargs or {}))


def _pieces(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor that checkpoints have under other names."""
    from transformers.core_model_loading import revert_weight_conversion

    with _CopiesShare():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(model, dict(tensors))
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for key, tensor in saved.items():
        name = names.get(tensor.untyped_storage()._cdata, key)
        if name != key:
            pieces[name].append(Piece(key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()))
    return {name: of for name, of in pieces.items() if sum(prod(one.size) for one in of) == tensors[name].numel()}


def _layer(name: str) -> int:
    """Return the number of the layer in a module's name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _same(left: Change, right: Change) -> bool:
    if left.index_K is None or right.index_K is None:
        return left.index_K is right.index_K and torch.equal(left.value_K, right.value_K)
    return torch.equal(left.index_K, right.index_K) and torch.equal(left.value_K, right.value_K)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ------------------------------------------------------------ in a server's workers


class Tainted(WeightsError):
    """Weights were written, and are not what they should be: the engine samples nothing until whole ones come."""


def check_layout(model: ModelFacts, answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a weight cannot be found in the server, or if the server has one that is not published."""
    for name, shape in model.shapes.items():
        parts = {tuple(map(_frozen, part)) for answer in answers for part in answer["spread"][name]}
        if sum(prod(size) for _, size, _ in parts) != prod(shape):
            raise ConfigError(f"the server's loader does not copy {name} as it is, but makes something of it", _HINT)
    for answer in answers:
        for what, why in (
            ("other_dtype", f"the server does not hold them in {model.dtype}"),
            ("unaligned", "their shards cannot be verified"),
            ("uncovered", "the server has them, the published weights do not"),
        ):
            if answer[what]:
                raise ConfigError(f"{', '.join(answer[what][:4])}: {why}", _HINT)


def split_tensors(model: ModelFacts, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tensors of which some rank holds only a part."""
    return [
        name
        for name, shape in model.shapes.items()
        if any(
            sum(prod(size) for _, size, _ in {tuple(map(_frozen, part)) for part in answer["spread"][name]})
            < prod(shape)
            for answer in answers
        )
    ]


def verify(model: ModelFacts, expected: Mapping[str, int], answers: Sequence[Mapping[str, Any]]) -> None:
    """Tainted when what the workers hold of a tensor is not what its fingerprint says."""
    for name, fingerprint in expected.items():
        sums: dict[Any, int] = {}
        for answer in answers:
            for offset, size, stride, found in answer[name]:
                key, value = (offset, tuple(size), tuple(stride)), int(found, 16)
                if sums.setdefault(key, value) != value:
                    raise _wrong(name, "its ranks hold different weights")
        if sum(sums.values()) % 2**64 != fingerprint:
            raise _wrong(name, "its fingerprint differs")


def _wrong(name: str, why: str) -> Tainted:
    return Tainted(f"the server does not hold the {name} that was published: {why}", "load the whole weights")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
