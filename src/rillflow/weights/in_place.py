"""A rank's parts of the newest version, in one copy on the host that each version writes over the one before.

While it is written over, each span of it keeps the words of 8 bytes that change. In 16 bits few weights change from
step to step, so both versions together take little more memory than one. A span of which most words change keeps all of
them. The difference of the two versions is found afterwards, from the new one and slices of the old one.

Invariants: the copy has exactly the bits of the weights that were taken last; `version` is the version before, and None
where that cannot be restored bit for bit; whatever is taken without being held is undone by the next taking.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rillflow.kernels.delta.format import Array
from rillflow.weights import delta
from rillflow.weights.delta_file import WORD, Made, Part, made_of, runs
from rillflow.weights.fingerprint import bits_of, fingerprint
from rillflow.weights.previous import Difference, Parts, collected

_WORDS = 1 << 15  # of a span: a place in it takes two bytes, and a core's cache holds the span
_KEPT = np.dtype(np.uint16).itemsize + WORD  # bytes of a word that is kept
_MODULUS = 1 << 64


class _Span(NamedTuple):
    """The former content of a span of a run: all its `weights`, or the `words` at `places` that changed and the weights
    behind its last whole word."""

    begin: int
    weights: Array
    places: Array | None
    words: Array | None

    def before(self, now_N: Array) -> Array:
        """Return the former weights of the span, of which `now_N` are the present ones."""
        if self.places is None or self.words is None:
            return self.weights
        found_N = now_N.copy()
        whole = len(found_N) - len(self.weights)
        found_N[:whole].view(np.uint64)[self.places] = self.words
        found_N[whole:] = self.weights
        return found_N


@dataclass(slots=True)
class _Run:
    parts: tuple[Part, ...]
    weights: torch.Tensor
    fingerprint: int | None = None  # of the version before; None: not known
    spans: list[_Span] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def places(self) -> Iterator[tuple[Part, int]]:
        """Yield each part with the place of its first weight in the run."""
        at = 0
        for part in self.parts:
            yield part, at
            at += part.weights

    def old(self, wanted: slice) -> Array:
        """Return the bits of the version before."""
        found_N = bits_of(self.weights[wanted]).copy()
        for number in range(bisect_right(self.ends, wanted.start), len(self.spans)):
            span, end = self.spans[number], self.ends[number]
            if span.begin >= wanted.stop:
                break
            low, high = max(span.begin, wanted.start), min(end, wanted.stop)
            before_N = span.before(bits_of(self.weights[span.begin : end]))
            found_N[low - wanted.start : high - wanted.start] = before_N[low - span.begin : high - span.begin]
        return found_N

    def known(self) -> int:
        """Return the fingerprint of the version before."""
        if self.fingerprint is None:
            each = WORD // self.weights.element_size()
            slices = delta.runs_of(len(self.weights), delta.SEGMENT_LOG2)
            sums = (fingerprint(torch.from_numpy(self.old(one)), one.start // each) for one in slices)
            self.fingerprint = sum(sums) % _MODULUS
        return self.fingerprint

    def undo(self) -> None:
        now_N = bits_of(self.weights)
        for span, end in zip(self.spans, self.ends, strict=True):
            now_N[span.begin : end] = span.before(now_N[span.begin : end])
        self.forget()

    def forget(self) -> None:
        self.spans, self.ends = [], []


class InPlace:
    """The parts of the version that was taken last; until it is held, also those of the version before."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._runs: list[_Run] = []
        self._sums: Mapping[Part, int] = {}

    def take(self, weights: Parts, dtype: torch.dtype, *, keep: bool) -> None:
        """Copy these weights in `dtype`. With `keep`, `difference` can then be asked for."""
        if not self._runs:
            like = torch.empty(0, dtype=dtype)
            self._runs = [_Run(parts, _room(parts, dtype)) for parts in runs(dict.fromkeys(weights, like))]
        for run in self._runs:
            run.undo()
        if not keep:
            self.version = None
            for run in self._runs:
                for part, at in run.places():
                    run.weights[at : at + part.weights].copy_(weights[part].detach().reshape(-1))
            return
        threads = torch.get_num_threads()
        room = torch.empty(threads * _WORDS * WORD // dtype.itemsize, dtype=dtype)
        with ThreadPoolExecutor(threads) as pool:
            for run in self._runs:
                for span, end in _replaced(run, weights, room, map if threads == 1 else pool.map):
                    run.spans.append(span)
                    run.ends.append(end)

    @property
    def parts(self) -> dict[Part, torch.Tensor]:
        """Return the parts that were taken, valid until the next taking."""
        views = {part: run.weights[at : at + part.weights] for run in self._runs for part, at in run.places()}
        # Loops over words want them aligned; parts of most models are.
        return {part: view.clone() if view.data_ptr() % WORD else view for part, view in views.items()}

    def difference(self) -> Difference:
        """Return what turns the version before, which must have been kept, into what was taken, and forget it."""
        assert self.version is not None, "the version before is not known"
        self.version = None
        found = collected(self._made(), self._sums, self.parts)
        assert found is not None, "a difference may have any size"
        return found

    def _made(self) -> Iterator[tuple[tuple[Part, ...], Made]]:
        for run in self._runs:
            yield run.parts, made_of(run.parts, delta.encode_slices(run.old, run.weights, run.known()))
            run.forget()

    def hold(self, version: int, sums: Mapping[Part, int], fingerprints: Sequence[int] = ()) -> None:
        """Make what was taken the version before the next one."""
        for number, run in enumerate(self._runs):
            run.forget()
            run.fingerprint = fingerprints[number] if fingerprints else None
        self._sums, self.version = dict(sums), version


def _replaced(
    run: _Run, weights: Parts, room: torch.Tensor, at_once: Callable[..., Iterable[tuple[_Span, int] | None]]
) -> Iterator[tuple[_Span, int]]:
    """Write the new weights over those of the run, as many at once as there is `room` for; yield the spans in which any
    changes, with their ends."""
    now_N, cast_N, size = bits_of(run.weights), bits_of(room), _WORDS * WORD // room.element_size()
    for part, at in run.places():
        flat = weights[part].detach().reshape(-1)
        for first in range(0, part.weights, len(room)):
            count = min(len(room), part.weights - first)
            room[:count].copy_(flat[first : first + count])
            found = at_once(partial(_replace, now_N, cast_N[:count], at + first, size), range(0, count, size))
            yield from (one for one in found if one is not None)


def _replace(now_N: Array, new_N: Array, at: int, size: int, first: int) -> tuple[_Span, int] | None:
    """Write a span of `new_N`, which begins at `at` in the run, over what it was."""
    new_N = new_N[first : first + size]
    begin, end = at + first, at + first + len(new_N)
    old_N = now_N[begin:end]
    whole = old_N.nbytes // WORD * WORD // old_N.itemsize
    old_W, new_W = (bits_N[:whole].view(np.uint64) for bits_N in (old_N, new_N))
    places = np.flatnonzero(old_W != new_W)
    if not len(places) and np.array_equal(old_N[whole:], new_N[whole:]):
        return None
    if len(places) * _KEPT >= old_N.nbytes:
        span = _Span(begin, old_N.copy(), None, None)
        old_N[:] = new_N
        return span, end
    span = _Span(begin, old_N[whole:].copy(), places.astype(np.uint16), old_W[places])
    old_W[places] = new_W[places]
    old_N[whole:] = new_N[whole:]
    return span, end


def _room(parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sum(part.weights for part in parts), dtype=dtype)
