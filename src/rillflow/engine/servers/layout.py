"""What a server's workers say of where weights live and what they are: checked and added up over ranks.

Invariant: parts of a tensor that several ranks hold alike count once, and only if they are the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from rillflow.engine.servers.facts import ModelFacts
from rillflow.errors import ConfigError, WeightsError

_HINT = "weights are changed in place: serve the model unquantised, in the dtype that is published"


class Tainted(WeightsError):
    """Weights were written, and are not what they should be: the engine samples nothing until whole ones come."""


def check_layout(model: ModelFacts, answers: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError when a weight cannot be followed to where the server keeps it, or when it has one of its own."""
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
