"""The version that was published last, kept in memory: what the next delta begins with.

It lies where its tensors came from: those of a GPU stay there, so that only what has changed leaves it. Invariant: what
is held is a copy, bit for bit what was published as `version`, whatever the caller does to its own tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rillflow.weights.delta.container import Part, Piece
from rillflow.weights.delta.pieces import WORD, joined, piece_of, runs
from rillflow.weights.fingerprint import fingerprint, plain

Parts = Mapping[Part, torch.Tensor]


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> dict[Part, torch.Tensor]:
    """Tensors as parts that are all of them."""
    return {Part(name, 0, tensor.numel()): tensor for name, tensor in tensors.items()}


def sum_of(part: Part, tensor: torch.Tensor, *, compiled: bool = True) -> int:
    """What a part adds to the fingerprint of its tensor; without compiled loops where they are not there yet."""
    return (fingerprint if compiled else plain)(tensor, part.first * tensor.element_size() // WORD)


class Difference(NamedTuple):
    """`sums` are what the new parts add to their tensors' fingerprints, `runs` the fingerprints of the new runs;
    `changed` counts weights."""

    pieces: list[Piece]
    sums: dict[Part, int]
    runs: list[int]
    changed: int


@dataclass(slots=True)
class _Run:
    parts: tuple[Part, ...]
    weights: torch.Tensor
    fingerprint: int | None  # None: not known yet


class Previous:
    """Its tensors are parts: all of a tensor, or what one rank has of it."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._runs: list[_Run] = []
        self._facts: object = None
        self._sums: dict[Part, int] = {}

    def fits(self, weights: Parts, aliases: Mapping[str, str]) -> bool:
        """Whether these are the same parts: names, ties, dtypes and shapes."""
        return self._facts == _facts(weights, aliases)

    def difference(self, weights: Parts, most: float) -> Difference | None:
        """What turns the held version into these weights, which fit; None when that takes more than `most` bytes."""
        pieces: list[Piece] = []
        fingerprints: list[int] = []
        sums = dict(self._sums)
        size = changed = 0
        for run in self._runs:
            new = joined([weights[part] for part in run.parts])
            run.weights = run.weights.to(new.device)
            piece, found, count = piece_of(run.parts, run.weights, new, run.fingerprint)
            fingerprints.append(found)
            if piece is None:
                continue
            pieces.append(piece)
            alone = len(run.parts) == 1 and run.parts[0].first == 0
            sums |= {part: found if alone else sum_of(part, weights[part]) for part in run.parts}
            changed, size = changed + count, size + len(piece.data)
            if size > most:
                return None
        return Difference(pieces, sums, fingerprints, changed)

    def hold(
        self,
        weights: Parts,
        aliases: Mapping[str, str],
        version: int,
        sums: Mapping[Part, int],
        fingerprints: Sequence[int] = (),
    ) -> None:
        """Copy these parts, into the memory that is there if they fit. `fingerprints` are those of the runs, if they
        are known: of a `Difference` to these parts."""
        self.version = None
        if not self.fits(weights, aliases):
            self._runs = [_Run(parts, _room(weights, parts), None) for parts in runs(weights)]
        for number, run in enumerate(self._runs):
            at = 0
            for part in run.parts:
                run.weights[at : at + part.weights].copy_(weights[part].detach().reshape(-1))
                at += part.weights
            run.fingerprint = fingerprints[number] if fingerprints else None
        self._facts, self._sums = _facts(weights, aliases), dict(sums)
        self.version = version


def _facts(weights: Parts, aliases: Mapping[str, str]) -> object:
    return {part: (tensor.dtype, tensor.shape) for part, tensor in weights.items()}, dict(aliases)


def _room(weights: Parts, parts: Sequence[Part]) -> torch.Tensor:
    """For the weights of a run."""
    first = weights[parts[0]]
    return torch.empty(sum(part.weights for part in parts), dtype=first.dtype, device=first.device)
