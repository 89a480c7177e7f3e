from __future__ import annotations

import pytest

from bench.edf_simulation import EarliestDeadline, Fifo, World, medians, simulate, table

SHORT = World(steps=120, warmup=30)


@pytest.mark.parametrize("seed", range(3))
def test_earliest_deadline_expires_less_than_first_in_first_out(seed):
    edf, fifo = simulate(EarliestDeadline(), seed, SHORT), simulate(Fifo(), seed, SHORT)
    assert 0.12 < fifo.expired_share < 0.22  # as published of FIFO
    assert edf.expired_share < 0.75 * fifo.expired_share
    assert fifo.length_bias > 1.3
    assert edf.steps_per_second >= 0.99 * fifo.steps_per_second


def test_a_simulation_is_repeatable():
    assert simulate(Fifo(), 1, SHORT) == simulate(Fifo(), 1, SHORT) != simulate(Fifo(), 2, SHORT)


def test_nothing_expires_where_nothing_takes_long():
    even = World(sigma=0.01, slots=32, steps=60, warmup=10)
    for sampler in (EarliestDeadline(), Fifo()):
        outcome = simulate(sampler, 0, even)
        assert (outcome.expired, outcome.length_bias) == (0, 0.0)
        assert outcome.produced > 0


def test_medians_and_table():
    small = World(steps=20, warmup=5)
    assert set(medians("fifo", [0, 1, 2], small)) == {"expired_share", "length_bias", "steps_per_second"}
    assert table([0], [small]).row_count == 2
