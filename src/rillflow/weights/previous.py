"""The version that was published last, kept in memory as the base of the next delta.

It stays on the device of its tensors, so only changes leave a GPU. Invariant: it is a copy, bit for bit what was
published as `version`, whatever the caller does to its own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rillflow.kernels.delta.format import DTYPES
from rillflow.weights.delta_file import RUN, WORD, Made, Part, Piece, joined, piece_of, pieces_on_device, runs
from rillflow.weights.fingerprint import fingerprints, plain

Parts = Mapping[Part, torch.Tensor]
_BATCH = 16 * RUN  # weights that are joined at once on a GPU


def sums_of(weights: Parts, *, compiled: bool = True) -> dict[Part, int]:
    """Return the parts' contributions to the fingerprints of their tensors, without compiled loops if not
    `compiled`."""
    given = [(tensor, part.first * tensor.element_size() // WORD) for part, tensor in weights.items()]
    return dict(zip(weights, fingerprints(given) if compiled else [plain(*one) for one in given], strict=True))


class Difference(NamedTuple):
    """A difference of two versions. `sums` are the new parts' contributions to their tensors' fingerprints, `runs` the
    fingerprints of the new runs; `changed` counts weights."""

    pieces: list[Piece]
    sums: dict[Part, int]
    runs: list[int]
    changed: int


def collected(
    made: Iterable[tuple[tuple[Part, ...], Made]], known: Mapping[Part, int], weights: Parts, most: float = math.inf
) -> Difference | None:
    """Return the difference of what was made of each run; None if it takes more than `most` bytes. `known` are the sums
    of the version before, `weights` the new ones."""
    pieces: list[Piece] = []
    fingerprints_of_runs: list[int] = []
    split: list[Part] = []  # parts that share a run, so that their sums are not those of the run
    sums = dict(known)
    size = changed = 0
    for parts, (piece, found, count) in made:
        fingerprints_of_runs.append(found)
        if piece is None:
            continue
        pieces.append(piece)
        if len(parts) == 1 and parts[0].first == 0:
            sums[parts[0]] = found
        else:
            split += parts
        changed, size = changed + count, size + len(piece.data)
        if size > most:
            return None
    sums |= sums_of({part: weights[part] for part in split})
    return Difference(pieces, sums, fingerprints_of_runs, changed)


@dataclass(slots=True)
class _Run:
    parts: tuple[Part, ...]
    weights: torch.Tensor
    fingerprint: int | None  # None: not known yet


class Previous:
    """The last version in parts: whole tensors, or one rank's parts of them."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._runs: list[_Run] = []
        self._facts: object = None
        self._sums: dict[Part, int] = {}

    def fits(self, weights: Parts, aliases: Mapping[str, str]) -> bool:
        """Return whether these are the same parts: names, ties, dtypes and shapes."""
        return self._facts == _facts(weights, aliases)

    def difference(self, weights: Parts, most: float) -> Difference | None:
        """Return what turns this version into the fitting `weights`; None if that takes more than `most` bytes."""
        made = (pair for some in _batches(self._runs) for pair in zip(some, _made(some, weights), strict=True))
        return collected(((run.parts, one) for run, one in made), self._sums, weights, most)

    def hold(
        self,
        weights: Parts,
        aliases: Mapping[str, str],
        version: int,
        sums: Mapping[Part, int],
        fingerprints: Sequence[int] = (),
    ) -> None:
        """Copy these parts, into the same memory if they fit. `fingerprints` are those of the runs, if they are known
        from a `Difference` to these parts."""
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


def _batches(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Yield runs whose deltas are made together: on a GPU as many as `_BATCH` weights of joined tensors allow. Tensors
    that are runs by themselves need no joining."""
    some: list[_Run] = []
    joined_weights = 0
    for run in runs:
        mine = len(run.weights) if len(run.parts) > 1 else 0
        if some and (joined_weights + mine > _BATCH or not _alike(some[-1], run)):
            yield some
            some, joined_weights = [], 0
        some.append(run)
        joined_weights += mine
    if some:
        yield some


def _alike(one: _Run, other: _Run) -> bool:
    """Return whether the GPU encodes both in one call."""
    known = (one.fingerprint is None) == (other.fingerprint is None)
    coded = one.weights.dtype in DTYPES and other.weights.dtype in DTYPES
    return known and coded and one.weights.is_cuda and one.weights.device == other.weights.device


def _made(some: Sequence[_Run], weights: Parts) -> list[Made]:
    news = [joined([weights[part] for part in run.parts]) for run in some]
    for run, new in zip(some, news, strict=True):
        run.weights = run.weights.to(new.device)
    if len(some) > 1:
        pairs = [(run.weights, new) for run, new in zip(some, news, strict=True)]
        return pieces_on_device([run.parts for run in some], pairs, [run.fingerprint for run in some])
    (run,), (new,) = some, news
    return [piece_of(run.parts, run.weights, new, run.fingerprint)]


def _facts(weights: Parts, aliases: Mapping[str, str]) -> object:
    return {part: (tensor.dtype, tensor.shape) for part, tensor in weights.items()}, dict(aliases)


def _room(weights: Parts, parts: Sequence[Part]) -> torch.Tensor:
    """Return memory for the weights of a run."""
    first = weights[parts[0]]
    return torch.empty(sum(part.weights for part in parts), dtype=first.dtype, device=first.device)
