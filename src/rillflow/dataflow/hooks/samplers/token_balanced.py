"""The samples of a batch among the ranks of a trainer, so that all have about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(tokens: Sequence[int], ranks: int, loads: Sequence[int] = (), *, equal_counts: bool = False) -> list[int]:
    """The rank of each sample, where `loads` are the tokens that the ranks have already.

    The ranks' tokens are within the largest sample of each other, or not further apart than `loads` were. With
    `equal_counts` the ranks also get as many samples as each other, give or take one.
    """
    if ranks < 1 or len(loads) not in (0, ranks):
        raise ValueError(f"{len(loads)} loads do not fit {ranks} ranks")
    start = list(loads) or [0] * ranks
    longest_first = sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample))
    deal = _in_rounds if equal_counts else _to_the_least_loaded
    return deal(tokens, longest_first, start)


def _to_the_least_loaded(tokens: Sequence[int], longest_first: list[int], loads: list[int]) -> list[int]:
    of_sample = [0] * len(tokens)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for sample in longest_first:
        load, rank = heap[0]
        of_sample[sample] = rank
        heapq.heapreplace(heap, (load + tokens[sample], rank))
    return of_sample


def _in_rounds(tokens: Sequence[int], longest_first: list[int], loads: list[int]) -> list[int]:
    """Each rank gets one sample a round, the least loaded the longest: the gap between two ranks either shrinks or
    turns into at most the difference of what the round gave them."""
    of_sample = [0] * len(tokens)
    for first in range(0, len(longest_first), len(loads)):
        by_load = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
        for rank, sample in zip(by_load, longest_first[first : first + len(loads)], strict=False):
            of_sample[sample] = rank
            loads[rank] += tokens[sample]
    return of_sample
