"""Token trees for drawing: the samples of an episode, put together where their tokens are the same.

Each sample is a root-to-leaf path. A piece is a stretch of tokens that the same samples share and that either all
train or are all given; what several samples share is drawn once, in the row of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from rillflow.storage.trajectories import TokenPath

MOST_PIECES = 3000


class Piece(msgspec.Struct):
    """Tokens `begin` to `end` of `sample`, drawn in `row`; `parent` is the piece before it, -1 for none. `shared`
    counts the samples that have it."""

    begin: int
    end: int
    row: int
    sample: int
    trained: bool
    shared: int
    parent: int
    fork: str = ""


class Tree(msgspec.Struct):
    """The tree of one policy. `cut` tells that pieces beyond the first were left out."""

    policy: str
    rows: int
    tokens: int
    pieces: list[Piece]
    cut: bool = False


def token_trees(samples: Sequence[TokenPath]) -> list[Tree]:
    """One tree for each policy, in the order of the samples."""
    trees = []
    for policy in dict.fromkeys(sample.policy for sample in samples):
        own = [number for number, sample in enumerate(samples) if sample.policy == policy]
        trees.append(_grown(policy, samples, own))
    return trees


def _grown(policy: str, samples: Sequence[TokenPath], own: list[int]) -> Tree:
    tree = Tree(policy, 0, max((len(samples[number].tokens) for number in own), default=0), [])
    # What is left to draw: samples that are the same up to `begin`, and the piece that they follow. The last comes
    # first, so that rows are in the order of the samples.
    waiting = [(group, 0, -1) for group in reversed(_apart(samples, own, 0))]
    while waiting and not tree.cut:
        group, begin, parent = waiting.pop()
        shared = _shared(samples, group, begin)
        if parent < 0 or tree.pieces[parent].end != begin or _is_fork(tree, parent):
            row = tree.rows
            tree.rows += 1
        else:
            row = tree.pieces[parent].row
        parent = _add_pieces(tree, samples, group, range(begin, shared), row=row, parent=parent)
        longer = [number for number in group if len(samples[number].tokens) > shared]
        waiting += [(one, shared, parent) for one in reversed(_apart(samples, longer, shared))]
    return tree


def _is_fork(tree: Tree, parent: int) -> bool:
    """Return whether a piece already has a child: the first child continues its row."""
    return any(piece.parent == parent for piece in tree.pieces[parent + 1 :])


def _apart(samples: Sequence[TokenPath], group: Sequence[int], at: int) -> list[list[int]]:
    """The samples by their token at `at`, in their order."""
    found: dict[int, list[int]] = {}
    for number in group:
        tokens = samples[number].tokens
        if len(tokens) > at:
            found.setdefault(int(tokens[at]), []).append(number)
    return list(found.values())


def _shared(samples: Sequence[TokenPath], group: Sequence[int], begin: int) -> int:
    """How many tokens, from the first, all of a group have in common."""
    first = samples[group[0]].tokens
    end = min(len(samples[number].tokens) for number in group)
    for number in group[1:]:
        differs = np.flatnonzero(samples[number].tokens[begin:end] != first[begin:end])
        if len(differs):
            end = begin + int(differs[0])
    return end


def _add_pieces(
    tree: Tree, samples: Sequence[TokenPath], group: Sequence[int], stretch: range, *, row: int, parent: int
) -> int:
    """Add the stretch as one piece for each change between given and trained tokens; returns the last piece."""
    # Tokens that several samples share train in one of them.
    trains = np.any([samples[number].mask[stretch.start : stretch.stop] for number in group], axis=0)
    edges = [0, *(np.flatnonzero(np.diff(trains.astype(np.int8))) + 1).tolist(), len(stretch)]
    for low, high in pairwise(edges):
        if len(tree.pieces) >= MOST_PIECES:
            tree.cut = True
            return parent
        fork = samples[group[0]].fork if low == 0 and parent >= 0 and row != tree.pieces[parent].row else ""
        tree.pieces.append(
            Piece(stretch[low], stretch.start + high, row, group[0], bool(trains[low]), len(group), parent, fork)
        )
        parent = len(tree.pieces) - 1
    return parent
