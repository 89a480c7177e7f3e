"""Sums of mixed words, the compiled part of `weights.fingerprint`: words have 8 bytes, the last one is padded. And the
union of two lists of places."""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.format import Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


@inlined
def mixed(word: Any, number: int) -> Any:
    """Return what the word of this number, counted from 0, adds to the fingerprint."""
    z = word + np.uint64(number + 1) * _STEP
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@inlined
def word_of(weights_N: Array, number: int) -> Any:
    """The word of this number; `weights_N` are unsigned integers of 1, 2, 4 or 8 bytes."""
    each = 8 // weights_N.itemsize
    word = np.uint64(0)
    for place in range(each):
        at = number * each + place
        if at < len(weights_N):
            word |= np.uint64(weights_N[at]) << np.uint64(place * 8 * weights_N.itemsize)
    return word


@compiled
def total(words_W: Array, first_word: int) -> Any:
    """The sum over whole words that begin at `first_word` of their tensor."""
    found = np.uint64(0)
    for number in range(len(words_W)):
        found += mixed(words_W[number], first_word + number)
    return found


@compiled
def gained(old_W: Array, new_W: Array, first_word: int) -> Any:
    """Return what the sum gains when words become others; only those that differ are mixed."""
    found = np.uint64(0)
    for number in range(len(old_W)):
        if old_W[number] != new_W[number]:
            found += mixed(new_W[number], first_word + number) - mixed(old_W[number], first_word + number)
    return found


@compiled
def difference(weights_N: Array, index_K: Array, value_K: Array, first_word: int) -> Any:
    """Return what the fingerprint gains when the weights at `index_K`, ascending and inside, become `value_K`."""
    each = 8 // weights_N.itemsize
    found = np.uint64(0)
    at = 0
    while at < len(index_K):
        number = index_K[at] // each
        before = word_of(weights_N, number)
        after = before
        while at < len(index_K) and index_K[at] // each == number:
            flip = np.uint64(weights_N[index_K[at]] ^ value_K[at])
            after ^= flip << np.uint64((index_K[at] - number * each) * 8 * weights_N.itemsize)
            at += 1
        found += mixed(after, first_word + number) - mixed(before, first_word + number)
    return found


@compiled
def union(one_K: Array, other_K: Array) -> Array:
    index_K = np.empty(len(one_K) + len(other_K), np.int64)
    end = at = beside = 0
    while at < len(one_K) and beside < len(other_K):
        first, second = one_K[at], other_K[beside]
        index_K[end] = min(first, second)
        end += 1
        at += first <= second
        beside += second <= first
    for rest_K in (one_K[at:], other_K[beside:]):
        for place in rest_K:
            index_K[end] = place
            end += 1
    return index_K[:end]
