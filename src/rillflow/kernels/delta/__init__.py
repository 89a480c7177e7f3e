"""The coding of weight deltas on the host: segments of a delta written and read, and sums of words for fingerprints.

`format` documents the bytes. The loops are compiled by numba; `reference` has the same functions in numpy, which a
process uses whose kernels are off. A test compares what both write and read.

What it gains (`bench.kernels`, one core of a Neoverse-N1): a version of 135 million weights in bf16 takes a
trainer and a node 0.6 s together, and 1.9 s with the reference.
"""

from __future__ import annotations

from rillflow.kernels import enabled
from rillflow.kernels.delta import reference
from rillflow.kernels.delta.format import Array, Coded, Found, Layout

# The compiled modules are imported where they are used: their compiler takes a second to import.


def encode(old_N: Array, new_N: Array, layout: Layout, first_word: int) -> Coded:
    """Write a segment. `first_word` is the place of its first word in the tensor."""
    if not enabled("delta"):
        return reference.encode(old_N, new_N, layout, first_word)
    from rillflow.kernels.delta import writing

    return writing.encode(old_N, new_N, layout, first_word)


def decode(old_N: Array, data: memoryview, layout: Layout, first_word: int) -> Found:
    """Read a coded segment. Raise CorruptData where its bytes are damaged, whatever they are."""
    if not enabled("delta"):
        return reference.decode(old_N, data, layout, first_word)
    from rillflow.kernels.delta import reading

    return reading.decode(old_N, data, layout, first_word)


def total(words_W: Array, first_word: int) -> int:
    """Return what whole words that begin at `first_word` of a tensor add to its fingerprint, modulo 2**64."""
    if not enabled("delta"):
        return reference.total(words_W, first_word)
    from rillflow.kernels.delta import words

    return int(words.total(words_W, first_word))


def gained(old_W: Array, new_W: Array, first_word: int) -> int:
    """Return what a fingerprint gains when whole words become others."""
    if not enabled("delta"):
        return reference.total(new_W, first_word) - reference.total(old_W, first_word)
    from rillflow.kernels.delta import words

    return int(words.gained(old_W, new_W, first_word))


def difference(weights_N: Array, index_K: Array, value_K: Array, first_word: int) -> int:
    """Return what a fingerprint gains when the weights at `index_K`, ascending and inside, become `value_K`."""
    if not enabled("delta"):
        return reference.difference(weights_N, index_K, value_K, first_word)
    from rillflow.kernels.delta import words

    return int(words.difference(weights_N, index_K, value_K, first_word))


def union(one_K: Array, other_K: Array) -> Array:
    """Return the ascending list of what is in either of two ascending lists without repetition."""
    if not enabled("delta"):
        return reference.union(one_K, other_K)
    from rillflow.kernels.delta import words

    return words.union(one_K, other_K)
