"""Rows as a forest: what rows have in common from their beginning on is there once.

Rows are taken in an order in which each shares the most with the one before it (`sorted_rows`), or in any other. A row
leaves the path of the row before it at its *fork*, the number of tokens it shares; the tokens from there on are its
branch. Branches lie end to end, in the order of their rows, and that is depth first: all that hangs on a run of tokens
follows it without a gap. Everything is near-linear in tokens, and the same rows give the same forest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Ints

# Sharing fewer tokens than this saves too little for one more segment: 8 tokens among 8 short rows, some 6 % of a step.
WORTHWHILE = 16


def sorted_rows(tokens_N: npt.NDArray[np.int32], start_R: Ints, length_R: Ints) -> Ints:
    """Row numbers in the order of their tokens: rows with a common beginning come together, shorter ones first."""
    text = tokens_N.astype(">i4").tobytes()  # as bytes, numbers without sign compare like the numbers
    keys = [text[4 * a : 4 * (a + n)] for a, n in zip(start_R.tolist(), length_R.tolist(), strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def shared_with_previous(tokens_N: npt.NDArray[np.int32], start_R: Ints, length_R: Ints) -> Ints:
    """How many tokens each row has in common with the row before it, from the beginning on; 0 for the first."""
    shared_R = np.zeros(len(start_R), dtype=np.int64)
    spans = list(zip(start_R.tolist(), length_R.tolist(), strict=True))
    for row, ((a, n), (b, m)) in enumerate(pairwise(spans), start=1):
        least = min(n, m)
        differ = tokens_N[a : a + least] != tokens_N[b : b + least]
        first = int(differ.argmax()) if least else 0
        shared_R[row] = first if least and differ[first] else least
    return shared_R


@dataclass(frozen=True)
class Forest:
    """The branch of row r holds its tokens from `fork_R[r]` on and begins at `begin_R[r]` of P; what comes before them
    is on the path of row `parent_R[r]` (-1: nothing does)."""

    length_R: Ints
    fork_R: Ints
    parent_R: Ints
    begin_R: Ints

    @property
    def tokens(self) -> int:
        return int((self.length_R - self.fork_R).sum())

    def locate(self, row_T: Ints, depth_T: Ints) -> Ints:
        """Where in P the token is that row `row_T` has at `depth_T`."""
        row_T = row_T.copy()
        while (above_T := depth_T < self.fork_R[row_T]).any():
            row_T[above_T] = self.parent_R[row_T[above_T]]
        return self.begin_R[row_T] + depth_T - self.fork_R[row_T]

    def segments(self) -> tuple[Ints, Ints, Ints]:
        """`start_S`, `length_S`, `parent_S` of a layout: branches, cut wherever another one leaves them."""
        own = np.flatnonzero(self.length_R > self.fork_R)
        hung = own[self.parent_R[own] >= 0]
        last_of_parent = self.locate(self.parent_R[hung], self.fork_R[hung] - 1)
        tokens = self.tokens
        start_S = np.union1d(self.begin_R[own], last_of_parent + 1)
        start_S = start_S[start_S < tokens]
        length_S = np.diff(start_S, append=tokens)
        # A segment goes on from the one before it, unless a branch begins with it.
        parent_S = np.arange(len(start_S)) - 1
        parent_S[np.searchsorted(start_S, self.begin_R[own])] = -1
        parent_S[np.searchsorted(start_S, self.begin_R[hung])] = (
            np.searchsorted(start_S, last_of_parent, side="right") - 1
        )
        return _merged(start_S, length_S, parent_S)


def _merged(start_S: Ints, length_S: Ints, parent_S: Ints) -> tuple[Ints, Ints, Ints]:
    """Without cuts at which only one segment goes on, as in calls of one conversation: fewer passes of attention."""
    children_S = np.bincount(parent_S[parent_S >= 0], minlength=len(parent_S))
    # The only one that hangs on a segment follows it without a gap.
    keep_S = (parent_S < 0) | (children_S[parent_S] > 1)
    number_S = np.cumsum(keep_S) - 1
    parent_S = np.where(parent_S < 0, -1, number_S[parent_S])[keep_S]
    return start_S[keep_S], np.add.reduceat(length_S, np.flatnonzero(keep_S)), parent_S


def grown(length_R: Ints, shared_R: Ints, worthwhile: int = WORTHWHILE) -> Forest:
    """The forest of rows of which each shares `shared_R` tokens with the one before it."""
    fork_R = np.zeros_like(length_R)
    parent_R = np.full_like(length_R, -1)
    path: list[tuple[int, int]] = []  # the branches (row, fork) that the row before runs through, from the root on
    for row, shared in enumerate(shared_R.tolist()):
        while path and path[-1][1] >= shared:
            path.pop()
        fork = shared
        if path and shared - path[-1][1] < worthwhile:
            fork = path.pop()[1]  # where the branch itself leaves another: that is a cut already
        parent_R[row], fork_R[row] = (path[-1][0], fork) if path else (-1, 0)
        path.append((row, int(fork_R[row])))
    new_R = length_R - fork_R
    return Forest(length_R, fork_R, parent_R, np.cumsum(new_R) - new_R)
