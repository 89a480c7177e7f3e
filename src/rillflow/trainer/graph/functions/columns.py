"""Between columns over all tokens (N) and arrays over the trained ones (T); and groups over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.algorithms.advantages.groups import Groups
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.parallel.peers import Peers

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Floats, Ints
    from rillflow.trainer.graph.databuffer import Column


def trained(data: Databuffer, name: str) -> Floats:
    """A column over tokens, of the trained ones."""
    of_T: Floats = data[name][data["mask_N"]].astype(np.float64)
    return of_T


def rows_of(data: Databuffer) -> Ints:
    """The row of each trained token."""
    row_T: Ints = data.row_N[data["mask_N"]]
    return row_T


def spread(data: Databuffer, value_T: Floats) -> Column:
    """A column over all tokens, 0 where none is trained."""
    column_N = np.zeros(len(data["mask_N"]))
    column_N[data["mask_N"]] = value_T
    return column_N


def compared(data: Databuffer, score: Floats, row: Ints, peers: Peers) -> Groups:
    """The statistics of these scores, each of a row, over their groups on all ranks.

    Rows are of one group if they are those that the ledger compares with each other, whether a group is a prompt's, an
    agent's or a turn's; so they have the same statistics.
    """
    names = ("member_R", "alike_R", "group_mean_R", "group_std_R", "group_size_R")
    mine = np.column_stack([*(data[name][row] for name in names), score]).astype("<f8")
    parts = [np.frombuffer(part, "<f8").reshape(-1, len(names) + 1) for part in peers.everyone(mine.tobytes())]
    everyones = np.concatenate(parts)
    group: npt.NDArray[np.int64] = np.unique(everyones[:, :-1], axis=0, return_inverse=True)[1].reshape(-1)
    groups = Groups.of(everyones[:, -1], group)
    before = sum(len(part) for part in parts[: peers.rank])
    own = slice(before, before + len(score))
    return Groups(groups.mean_R[own], groups.std_R[own], groups.size_R[own])
