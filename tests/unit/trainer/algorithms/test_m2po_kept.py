"""M2PO's largest moment that stays, found without gathering tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer_threads import as_peers
from rillflow.trainer.algorithms.losses.m2po import highest_kept
from rillflow.trainer.parallel.peers import Peers

MOMENTS = st.lists(st.sampled_from([0.0, 1e-30, 0.001, 0.004, 0.02, 0.1, 3.0, 900.0]) | st.floats(0, 10), min_size=1)


def by_definition(moments: list[float], threshold: float) -> float:
    """Sorted, the last whose mean with all smaller ones is under the threshold; else the smallest."""
    ascending = sorted(moments)
    under = [k for k in range(len(ascending)) if np.mean(ascending[: k + 1]) < threshold]
    return ascending[under[-1]] if under else ascending[0]


@given(moments=MOMENTS, threshold=st.sampled_from([0.0021, 0.01003, 0.5007]))
def test_it_is_what_the_definition_says(moments: list[float], threshold: float) -> None:
    found = highest_kept(torch.tensor(moments, dtype=torch.float64), threshold)
    assert found == pytest.approx(by_definition(moments, threshold), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_find_the_same_and_one_may_have_none(ranks: int) -> None:
    moment_T = torch.from_numpy(np.random.default_rng(1).gamma(0.3, 0.05, 500))
    alone = highest_kept(moment_T, 0.01)

    def work(peers: Peers) -> float:
        empty = peers.rank == ranks - 1
        return highest_kept(moment_T[:0] if empty else moment_T[peers.rank :: ranks - 1], 0.01, peers)

    assert as_peers(ranks, work) == [alone] * ranks
