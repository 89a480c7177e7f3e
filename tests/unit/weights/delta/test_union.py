"""Places of two changes as one list, against sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.weights.delta.cpu.union import union

places = st.sets(st.integers(0, 60) | st.integers(0, 2**40), max_size=40)


@settings(deadline=None)  # the first call compiles
@given(places, places)
def test_a_union_has_each_place_once_and_in_order(one: set[int], other: set[int]) -> None:
    found = union(np.array(sorted(one), np.int64), np.array(sorted(other), np.int64))
    assert found.tolist() == sorted(one | other)
