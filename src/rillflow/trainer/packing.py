"""Rows become micro-batches under a budget of tokens, packed end to end.

Invariants: every row that trains is in exactly one micro-batch; the same rows give the same micro-batches; only a
micro-batch of one row may pass the budget. With trees the budget counts tokens as the model reads them: what rows of a
micro-batch share is counted once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.batches import Rows
from rillflow.trainer.forest import Forest, grown, shared_with_previous, sorted_rows
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.layout import Layout, MicroBatch, runs

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints

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
    """The micro-batches of the rows that train something, collated when they are called for.

    `columns` (of tokens, `…_N`) come out as `…_T`. `on` takes the score of a token at the token itself, not at the one
    before it. `in_order` keeps the rows' order.
    """
    rows = data.rows
    read_R = input_length(rows, on=on)
    order = np.flatnonzero(read_R)
    shared = np.zeros_like(order)
    if trees:
        order = order if in_order else order[sorted_rows(rows.tokens_N, rows.start_R[order], read_R[order])]
        shared = shared_with_previous(rows.tokens_N, rows.start_R[order], read_R[order])
    packs = pack(read_R[order], shared, budget, in_order=in_order)
    of = _Source(data, read_R, tuple(dict.fromkeys((*ALWAYS, *columns))), device, on)
    return [partial(_collate, of, order[at], np.where(np.diff(at, prepend=-2) == 1, shared[at], 0)) for at in packs]


def idle(columns: Sequence[str], device: torch.device) -> MicroBatch:
    """A micro-batch of one token that nothing depends on: all its columns are 0. For ranks that have nothing to do but
    must take part."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    first = np.zeros(1, dtype=np.int64)
    values = {_of_trained(name): torch.zeros(1, device=device) for name in (*ALWAYS, *columns)}
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
    """How many tokens of each row the model must read: those before the last trained one; with `on`, that one too."""
    trained = np.concatenate([[-1], np.flatnonzero(rows.mask_N)])
    last_R = trained[np.searchsorted(trained, rows.start_R + rows.length_R) - 1]
    return np.where(last_R >= rows.start_R, last_R - rows.start_R + on, 0)


# ------------------------------------------------------------ which rows go together


def pack(length_R: Ints, shared_R: Ints, budget: int, *, in_order: bool = False) -> list[Ints]:
    """Row numbers of each micro-batch: of about equal tokens, or in the rows' own order.

    Each row shares its first `shared_R` tokens with the one before it; those that hang together stay together.
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
    """The rows with which a part begins: those with which the budget would be passed; `apart`, also those that share
    nothing with the row before them."""
    cuts: list[int] = []
    held = 0
    for row, (length, fork) in enumerate(zip(length_R.tolist(), fork_R.tolist(), strict=True)):
        held += length - fork
        if not row or held > budget or (apart and not fork):
            cuts.append(row)
            held = length
    return cuts


def _balanced(size: Ints, budget: int) -> list[list[int]]:
    """The largest items first, each to the micro-batch that holds the least; to a new one when that is too full."""
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
    """What all micro-batches of a part are collated from."""

    data: Databuffer
    read_R: Ints
    columns: tuple[str, ...]
    device: torch.device
    on: bool


def _collate(of: _Source, index_B: Ints, shared_B: Ints) -> MicroBatch:
    """The micro-batch of the rows `index_B`, of which each shares `shared_B` tokens with the one before it."""
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
    return Layout(
        tokens_P=_on(of.device, rows.tokens_N[source_P].astype(np.int64)),
        position_P=_on(of.device, position_P),
        start_S=start_S,
        length_S=length_S,
        parent_S=parent_S,
    )


def _trained(rows: Rows, index_B: Ints) -> tuple[Ints, Ints]:
    """Of each trained token of these rows: its row (of B) and its place in it."""
    length_B = rows.length_R[index_B]
    depth = runs(np.zeros_like(length_B), length_B)
    row = np.repeat(np.arange(len(index_B)), length_B)
    trained = rows.mask_N[rows.start_R[index_B][row] + depth]
    return row[trained], depth[trained]


def _of_trained(name: str) -> str:
    return name.removesuffix("_N") + "_T"


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
