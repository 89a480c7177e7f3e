"""Rows become micro-batches under a budget of tokens: packed row after row without padding, as a forest of segments.

A segment is a run of tokens. A segment without a parent begins a row; a segment with a parent continues where its
parent ends and attends to all tokens of its ancestors. Without prefix sharing every row is one segment.

With trees, common prefixes of rows are stored once. Rows are ordered so that each shares the most with the row before
it (`sorted_rows`). A row leaves the path of the row before it at its *fork*, the number of tokens that it shares; its
tokens from there on are its branch. Branches are stored in the order of their rows, which is depth first: a segment's
descendants follow it without a gap. The budget counts a shared prefix once.

Invariants: every row that trains is in exactly one micro-batch; the same rows give the same micro-batches; only a
micro-batch of one row may exceed the budget; parents come before their children; a token's position is its distance
from the beginning of its row; a token attends to itself, to earlier tokens of its segment and to its ancestors only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.batches import EXPERTS, Databuffer, Rows, experts_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Ints


@dataclass(frozen=True)
class Layout:
    """The packed tokens and their segments.

    `tokens_P` and `position_P` are on the device. Segment s is `[start_S[s], start_S[s] + length_S[s])` of P; its
    parent is `parent_S[s]`, or -1. `experts_PW` are the experts that the engine chose for each token, or -1; None if
    none were recorded.
    """

    tokens_P: torch.Tensor
    position_P: torch.Tensor
    start_S: Ints
    length_S: Ints
    parent_S: Ints
    experts_PW: torch.Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """A layout and the trained tokens in it.

    The hidden state at packed position `select_T` gives the score of the trained token `target_T`, whose row (of `rows`
    in this micro-batch) is `row_T`. `columns` are over the same tokens: `old_T`, `temperature_T`, …. `source_T` is the
    token's place in the databuffer, `depth_T` its place in its row, `kept_T` the key of its sample
    (`batches.sample_key`) or 0. A token that several rows share appears once for each row that trains it.
    """

    layout: Layout
    select_T: torch.Tensor
    target_T: torch.Tensor
    row_T: torch.Tensor
    rows: int
    columns: Mapping[str, torch.Tensor]
    source_T: Ints
    depth_T: Ints
    kept_T: Ints


def runs(first: Ints, count: Ints) -> Ints:
    """Return `first[i], first[i] + 1, …`, `count[i]` numbers for each i, one run after the other."""
    before = np.cumsum(count) - count
    run: Ints = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return run


# ---------------------------------------------------------------- common prefixes


# A shorter common prefix saves less than one more segment costs (8 tokens in 8 short rows: about 6 % of a step).
WORTHWHILE = 16


def sorted_rows(tokens_N: npt.NDArray[np.int32], start_R: Ints, length_R: Ints) -> Ints:
    """Return row numbers in lexicographic order of tokens: rows with a common prefix are adjacent, shorter ones
    first."""
    text = tokens_N.astype(">i4").tobytes()  # big-endian bytes of non-negative numbers compare like the numbers
    keys = [text[4 * a : 4 * (a + n)] for a, n in zip(start_R.tolist(), length_R.tolist(), strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def shared_with_previous(tokens_N: npt.NDArray[np.int32], start_R: Ints, length_R: Ints) -> Ints:
    """Return the length of each row's common prefix with the row before it; 0 for the first row."""
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
    """Branches of rows. The branch of row r holds its tokens from `fork_R[r]` on and begins at `begin_R[r]` of P; the
    tokens before the fork are on the path of row `parent_R[r]` (-1: the fork is 0)."""

    length_R: Ints
    fork_R: Ints
    parent_R: Ints
    begin_R: Ints

    @property
    def tokens(self) -> int:
        return int((self.length_R - self.fork_R).sum())

    def locate(self, row_T: Ints, depth_T: Ints) -> Ints:
        """Return the place in P of the token at `depth_T` of row `row_T`."""
        row_T = row_T.copy()
        while (above_T := depth_T < self.fork_R[row_T]).any():
            row_T[above_T] = self.parent_R[row_T[above_T]]
        return self.begin_R[row_T] + depth_T - self.fork_R[row_T]

    def segments(self) -> tuple[Ints, Ints, Ints]:
        """Return `start_S`, `length_S`, `parent_S` of a layout: branches, cut where another branch leaves them."""
        own = np.flatnonzero(self.length_R > self.fork_R)
        hung = own[self.parent_R[own] >= 0]
        last_of_parent = self.locate(self.parent_R[hung], self.fork_R[hung] - 1)
        tokens = self.tokens
        start_S = np.union1d(self.begin_R[own], last_of_parent + 1)
        start_S = start_S[start_S < tokens]
        length_S = np.diff(start_S, append=tokens)
        # A segment continues the one before it, unless a branch begins with it.
        parent_S = np.arange(len(start_S)) - 1
        parent_S[np.searchsorted(start_S, self.begin_R[own])] = -1
        parent_S[np.searchsorted(start_S, self.begin_R[hung])] = (
            np.searchsorted(start_S, last_of_parent, side="right") - 1
        )
        return _merged(start_S, length_S, parent_S)


def _merged(start_S: Ints, length_S: Ints, parent_S: Ints) -> tuple[Ints, Ints, Ints]:
    """Join segments with their only child, as in calls of one conversation: attention then needs fewer passes."""
    children_S = np.bincount(parent_S[parent_S >= 0], minlength=len(parent_S))
    # An only child follows its parent without a gap.
    keep_S = (parent_S < 0) | (children_S[parent_S] > 1)
    number_S = np.cumsum(keep_S) - 1
    parent_S = np.where(parent_S < 0, -1, number_S[parent_S])[keep_S]
    return start_S[keep_S], np.add.reduceat(length_S, np.flatnonzero(keep_S)), parent_S


def grown(length_R: Ints, shared_R: Ints, worthwhile: int = WORTHWHILE) -> Forest:
    """Build the forest of rows, each of which shares `shared_R` tokens with the one before it."""
    fork_R = np.zeros_like(length_R)
    parent_R = np.full_like(length_R, -1)
    path: list[tuple[int, int]] = []  # the branches (row, fork) on the path of the row before, from the root on
    for row, shared in enumerate(shared_R.tolist()):
        while path and path[-1][1] >= shared:
            path.pop()
        fork = shared
        if path and shared - path[-1][1] < worthwhile:
            fork = path.pop()[1]  # the branch's own fork, which is a cut already
        parent_R[row], fork_R[row] = (path[-1][0], fork) if path else (-1, 0)
        path.append((row, int(fork_R[row])))
    new_R = length_R - fork_R
    return Forest(length_R, fork_R, parent_R, np.cumsum(new_R) - new_R)


# ---------------------------------------------------------------- micro-batches


# Columns that every micro-batch has.
ALWAYS = ("old_N", "temperature_N")


def micro_batches(
    data: Databuffer,
    columns: Sequence[str],
    budget: int,
    *,
    device: torch.device,
    trees: bool = False,
    in_order: bool = False,
    on: bool = False,
) -> list[Callable[[], MicroBatch]]:
    """Return functions that collate the micro-batches of the rows that train.

    `columns` over tokens (`…_N`) come out as `…_T`. With `on`, the score of a token is read at the token itself, not at
    the one before it. `in_order` keeps the rows' order.
    """
    rows = data.rows
    read_R = input_length(rows, on=on)
    order = np.flatnonzero(read_R)
    shared = np.zeros_like(order)
    if trees:
        order = order if in_order else order[sorted_rows(rows.tokens_N, rows.start_R[order], read_R[order])]
        shared = shared_with_previous(rows.tokens_N, rows.start_R[order], read_R[order])
    packs = pack(read_R[order], shared, budget, in_order=in_order)
    carried = tuple(name for name in dict.fromkeys((*ALWAYS, *columns)) if name != EXPERTS)
    of = _Source(data, read_R, carried, device, on)
    return [partial(_collate, of, order[at], np.where(np.diff(at, prepend=-2) == 1, shared[at], 0)) for at in packs]


def idle(columns: Sequence[str], device: torch.device) -> MicroBatch:
    """Return a micro-batch of one token without effect, for ranks that have no rows but must take part in a pass."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    first = np.zeros(1, dtype=np.int64)
    values = {_of_trained(name): torch.zeros(1, device=device) for name in (*ALWAYS, *columns) if name != EXPERTS}
    return MicroBatch(
        layout=Layout(one, one, first, first + 1, first - 1),
        select_T=one,
        target_T=one,
        row_T=one,
        rows=1,
        columns=values | {"temperature_T": torch.ones(1, device=device)},
        source_T=first,
        depth_T=first,
        kept_T=first,
    )


def input_length(rows: Rows, *, on: bool = False) -> Ints:
    """Return the tokens of each row that the model must read: those before the last trained one; with `on`, that
    too."""
    trained = np.concatenate([[-1], np.flatnonzero(rows.mask_N)])
    last_R = trained[np.searchsorted(trained, rows.start_R + rows.length_R) - 1]
    return np.where(last_R >= rows.start_R, last_R - rows.start_R + on, 0)


# ------------------------------------------------------------ which rows go together


def pack(length_R: Ints, shared_R: Ints, budget: int, *, in_order: bool = False) -> list[Ints]:
    """Return the row numbers of each micro-batch: of about equal tokens, or in the rows' own order.

    Each row shares its first `shared_R` tokens with the one before it; rows that share a prefix stay together.
    """
    if not len(length_R):
        return []
    if not in_order and not shared_R.any():
        return [np.array(held) for held in _balanced(length_R, budget)]
    fork_R = grown(length_R, shared_R).fork_R
    starts = _cuts(length_R, fork_R, budget, apart=not in_order)
    parts = np.split(np.arange(len(length_R)), starts[1:])
    if in_order:
        return parts
    new_R = length_R - fork_R
    new_R[starts] = length_R[starts]  # the first row of a part is read from its beginning
    return [
        np.concatenate([parts[part] for part in held]) for held in _balanced(np.add.reduceat(new_R, starts), budget)
    ]


def _cuts(length_R: Ints, fork_R: Ints, budget: int, *, apart: bool) -> list[int]:
    """Return the first row of each part: a part ends before the budget is exceeded; with `apart`, also before a row
    that shares nothing with the row before it."""
    cuts: list[int] = []
    held = 0
    for row, (length, fork) in enumerate(zip(length_R.tolist(), fork_R.tolist(), strict=True)):
        held += length - fork
        if not row or held > budget or (apart and not fork):
            cuts.append(row)
            held = length
    return cuts


def _balanced(size: Ints, budget: int) -> list[list[int]]:
    """Assign the largest items first, each to the micro-batch that holds the least, or to a new one if that is full."""
    least = -(-int(np.minimum(size, budget).sum()) // budget)
    held = [(0, number) for number in range(least)]
    packs: list[list[int]] = [[] for _ in held]
    sizes = size.tolist()
    for item in np.argsort(-size, kind="stable").tolist():
        tokens, number = held[0]
        if tokens and tokens + sizes[item] > budget:
            number = len(packs)
            packs.append([])
            heapq.heappush(held, (sizes[item], number))
        else:
            heapq.heapreplace(held, (tokens + sizes[item], number))
        packs[number].append(item)
    return [pack for pack in packs if pack]


# ------------------------------------------------------------ what the model reads of them


@dataclass(frozen=True)
class _Source:
    """The data that all micro-batches of a part are collated from."""

    data: Databuffer
    read_R: Ints
    columns: tuple[str, ...]
    device: torch.device
    on: bool


def _collate(of: _Source, index_B: Ints, shared_B: Ints) -> MicroBatch:
    """Collate the rows `index_B`, each of which shares `shared_B` tokens with the one before it."""
    rows, device = of.data.rows, of.device
    forest = grown(of.read_R[index_B], shared_B)
    row_T, depth_T = _trained(rows, index_B)
    source_T = rows.start_R[index_B][row_T] + depth_T
    return MicroBatch(
        layout=_layout(of, forest, index_B),
        select_T=_on(device, forest.locate(row_T, depth_T if of.on else depth_T - 1)),
        target_T=_on(device, rows.tokens_N[source_T].astype(np.int64)),
        row_T=_on(device, row_T),
        rows=len(index_B),
        columns={_of_trained(name): _on(device, of.data[name][source_T].astype(np.float32)) for name in of.columns},
        source_T=source_T,
        depth_T=depth_T,
        kept_T=rows.kept_R[index_B][row_T],
    )


def _layout(of: _Source, forest: Forest, index_B: Ints) -> Layout:
    rows = of.data.rows
    new_B = forest.length_R - forest.fork_R
    position_P = runs(forest.fork_R, new_B)
    source_P = np.repeat(rows.start_R[index_B], new_B) + position_P
    start_S, length_S, parent_S = forest.segments()
    experts_PW = experts_of(of.data, source_P)
    return Layout(
        tokens_P=_on(of.device, rows.tokens_N[source_P].astype(np.int64)),
        position_P=_on(of.device, position_P),
        start_S=start_S,
        length_S=length_S,
        parent_S=parent_S,
        experts_PW=None if experts_PW is None else _on(of.device, experts_PW),
    )


def _trained(rows: Rows, index_B: Ints) -> tuple[Ints, Ints]:
    """Return the row (of B) of each trained token of these rows, and the token's place in it."""
    length_B = rows.length_R[index_B]
    depth = runs(np.zeros_like(length_B), length_B)
    row = np.repeat(np.arange(len(index_B)), length_B)
    trained = rows.mask_N[rows.start_R[index_B][row] + depth]
    return row[trained], depth[trained]


def _of_trained(name: str) -> str:
    return name.removesuffix("_N") + "_T"


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
