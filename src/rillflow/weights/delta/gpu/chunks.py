"""Chunks: runs of at most so many items of one owner each, as programs of kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu.batch import Array, Parcel
from rillflow.weights.delta.gpu.tables import Plans
from rillflow.weights.delta.jit import compiled


class Maps(NamedTuple):
    """Of words of unary streams by segments, of events by columns, of words of the bitmaps of inverted groups, and of
    changes by groups: how many chunks there are, and on the device whose each is."""

    numbers: list[int]
    owners: list[torch.Tensor]


def chunk_maps(plans: Plans, events: int, words: int, device: torch.device) -> Maps:
    """Chunks of so many events or changes, or of so many words. Fills in `plans.chunks`, which are not sent yet."""
    ones, coded, inverted, changed = plans.chunks
    _starts(
        plans.unary, plans.events_from, plans.changes_from, plans.total, plans.kinds, plans.columns, events, words,
        ones, coded, inverted, changed,
    )  # fmt: skip
    numbers = [int(starts[-1]) for starts in plans.chunks]
    parcel = Parcel([], numbers, device)
    for starts, owner in zip(plans.chunks, parcel.arrays, strict=True):
        _own(starts, owner)
    return Maps(numbers, parcel.sent())


@compiled
def _starts(
    unary: Array, events_from: Array, changes_from: Array, total: Array, kinds: Array, columns: int, events: int,
    words: int, ones: Array, coded: Array, inverted: Array, changed: Array,
) -> None:  # fmt: skip
    at = 0
    for s in range(len(ones) - 1):
        ones[s] = at
        at += ((unary[s, 1] + 31 >> 5) - (unary[s, 0] >> 5) + words - 1) // words
    ones[-1] = at
    at = 0
    for column in range(len(coded) - 1):
        coded[column] = at
        at += (events_from[column + 1] - events_from[column] + events - 1) // events
    coded[-1] = at
    at, beyond = 0, 0
    for group in range(len(changed) - 1):
        inverted[group], changed[group] = at, beyond
        if kinds[group * columns] & 128:
            at += ((total[group * columns] + 31 >> 5) + words - 1) // words
        beyond += (changes_from[group + 1] - changes_from[group] + events - 1) // events
    inverted[-1], changed[-1] = at, beyond


@compiled
def _own(starts: Array, owner: Array) -> None:
    for number in range(len(starts) - 1):
        for chunk in range(starts[number], starts[number + 1]):
            owner[chunk] = number
