from __future__ import annotations

from collections import Counter

import pytest
from hook_groups import Waiting
from hypothesis import given
from hypothesis import strategies as st

from rillflow.config import DataflowConfig
from rillflow.contracts import Replayer
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Fifo, Replay
from rillflow.dataflow.ledger.serving import partition
from rillflow.errors import RunError

READY = [
    Waiting("young", order=0, oldest=9, staleness=0),
    Waiting("old", order=2, oldest=5, staleness=4),
    Waiting("as old", order=1, oldest=5, staleness=4),
    Waiting("other policy", order=3, oldest=95, staleness=5),
]


def test_earliest_deadline_goes_by_staleness_then_admission():
    assert EarliestDeadline().pick(READY, 3) == ["other policy", "as old", "old"]


def test_fifo_goes_by_admission():
    assert Fifo().pick(READY, 3) == ["young", "as old", "old"]


# ---------------------------------------------------------------- replay


def pool(size: int, version: int = 100) -> list[Waiting]:
    """Trained groups, four of each version."""
    ages = [number // 4 for number in range(size)]
    return [
        Waiting(f"g{number}", order=1000 - number, oldest=version - age, staleness=age, spread=0.1 * (number % 4))
        for number, age in enumerate(ages)
    ]


@pytest.mark.parametrize(
    ("ratio", "groups", "have", "count"), [(0.25, 8, 20, 2), (0.3, 8, 20, 2), (1, 8, 5, 5), (0, 8, 20, 0)]
)
def test_replay_serves_its_share_or_what_there_is(ratio, groups, have, count):
    for choose in ("latest", "random", "prioritised"):
        ids = Replay(ratio=ratio, choose=choose).replay(pool(have), groups)
        assert len(ids) == len(set(ids)) == count


@pytest.mark.parametrize("choose", ["latest", "random", "prioritised"])
def test_nothing_beyond_the_bound_is_replayed(choose):
    ids = Replay(ratio=1, staleness=2, choose=choose).replay(pool(100), 50)
    assert sorted(ids, key=lambda name: int(name[1:])) == [f"g{number}" for number in range(12)]


def test_the_latest_are_replayed_first():
    assert Replay(ratio=1).replay(list(reversed(pool(20))), 5) == ["g0", "g1", "g2", "g3", "g4"]


def test_random_replay_is_fixed_by_seed_and_version_and_even():
    def drawn(version: int, seed: int = 0) -> list[str]:
        return Replay(ratio=1, choose="random", seed=seed).replay(pool(32, version), 8)

    assert drawn(100) == drawn(100)
    assert drawn(100) != drawn(101)
    assert drawn(100) != drawn(100, seed=1)
    counts = Counter(name for version in range(400) for name in drawn(version))
    assert len(counts) == 32
    assert all(60 <= count <= 140 for count in counts.values())  # 100 each on average


def test_prioritised_replay_follows_spread_and_age():
    sampler = Replay(ratio=1, choose="prioritised", discount=0.5)
    weights = {"wide": (0.4, 0), "narrow": (0.1, 0), "old": (0.4, 2), "flat": (0.0, 0)}
    counts: Counter[str] = Counter()
    for version in range(3000):
        groups = [
            Waiting(name, oldest=version - age, staleness=age, spread=spread) for name, (spread, age) in weights.items()
        ]
        counts.update(sampler.replay(groups, 1))
    assert counts["flat"] == 0
    for name, share in {"wide": 4 / 6, "narrow": 1 / 6, "old": 1 / 6}.items():
        assert counts[name] / 3000 == pytest.approx(share, abs=0.03)
    assert set(sampler.replay(groups, 4)) == set(weights)


def test_the_fresh_sampler_picks_the_others():
    assert Replay(ratio=0.5).pick(READY, 2) == EarliestDeadline().pick(READY, 2)
    assert Replay(ratio=0.5, fresh="fifo").pick(READY, 2) == Fifo().pick(READY, 2)
    assert Replay(ratio=0.5, fresh={"fifo": {}}).pick(READY, 2) == Fifo().pick(READY, 2)


def hooks_with(sampler: object) -> Hooks:
    return Hooks.of(DataflowConfig.model_validate({"sampler": sampler}))


def test_the_run_knows_whether_its_sampler_replays():
    assert hooks_with("fifo").replayer is None
    assert hooks_with("fifo").replay(pool(4), 4) == []
    hooks = hooks_with({"replay": {"ratio": 0.5, "pool": 7, "staleness": 3}})
    assert isinstance(hooks.replayer, Replayer)
    assert (hooks.replayer.pool, hooks.replayer.staleness) == (7, 3)
    assert hooks.replay(pool(4), 4) == ["g0", "g1"]


@pytest.mark.parametrize("answer", [["g0", "g0"], ["nobody"], ["g0", "g1", "g2"]])
def test_a_sampler_that_replays_nonsense_is_named(answer):
    class Odd(Replay):
        def replay(self, pool, groups):
            return answer

    with pytest.raises(RunError, match="the sampler replays"):
        Hooks(sampler=Odd(ratio=1)).replay(pool(4), 2)


@pytest.mark.parametrize("answer", [["young", "young"], ["nobody", "old"], ["old"], ["old", "young", "old"]])
def test_a_sampler_that_picks_nonsense_is_named(answer):
    class Odd:
        def pick(self, ready, want):
            return answer

    with pytest.raises(RunError, match="the sampler picked"):
        Hooks(sampler=Odd()).pick(READY, 2)


# ---------------------------------------------------------------- token balance

SAMPLES = st.lists(st.integers(0, 5000), max_size=60)


def loads_after(tokens, of_sample, loads):
    after = list(loads)
    for size, rank in zip(tokens, of_sample, strict=True):
        after[rank] += size
    return after


@given(SAMPLES, st.lists(st.integers(0, 9000), min_size=1, max_size=9))
def test_ranks_are_within_the_largest_sample_of_each_other(tokens, loads):
    of_sample = partition(tokens, len(loads), loads)
    assert len(of_sample) == len(tokens)
    after = loads_after(tokens, of_sample, loads)
    assert max(after) - min(after) <= max([max(loads) - min(loads), *tokens])
    assert of_sample == partition(tokens, len(loads), loads)


@given(st.lists(SAMPLES, max_size=5), st.integers(1, 5))
def test_parts_of_a_stream_stay_balanced(parts, ranks):
    loads = [0] * ranks
    for part in parts:
        loads = loads_after(part, partition(part, ranks, loads), loads)
    assert max(loads) - min(loads) <= max([0, *(size for part in parts for size in part)])


def test_the_longest_goes_first_to_the_least_loaded():
    assert partition([1, 9, 5, 5], 2) == [0, 0, 1, 1]
    assert partition([4], 3, [2, 0, 1]) == [1]


@pytest.mark.parametrize(("ranks", "loads"), [(0, ()), (2, (1,)), (2, (1, 2, 3))])
def test_loads_that_do_not_fit_are_refused(ranks, loads):
    with pytest.raises(ValueError, match="do not fit"):
        partition([1], ranks, loads)
