"""Mixtures: shares follow the weights, any index is computed from itself alone, and a pass sees every prompt."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_support import ids, prompts

from rillflow.dataflow.sources import InOrder, Mixed, Part, Shuffled

NAMES = "abcdef"


def mixed(weights, lengths=None, kind=InOrder):
    lengths = lengths or [5] * len(weights)
    sources = [kind(prompts(length)) for length in lengths]
    return Mixed([Part(*part) for part in zip(NAMES[: len(weights)], weights, sources, strict=True)])


def names(source, places):
    return "".join(source.at(place).source for place in places)


def by_hand(weights, lengths, count):
    """The definition, the long way: all prompts of all sources in the order of their times."""
    times = [
        (Fraction(2 * place + 1, 2) / Fraction(str(weight)), which, place)
        for which, weight in enumerate(weights)
        for place in range(count)
    ]
    return [f"{NAMES[which]}/{place % lengths[which]}" for _, which, place in sorted(times)[:count]]


WEIGHTS = st.lists(st.integers(1, 12) | st.decimals(Fraction(1, 100), 20, places=2).map(float), min_size=1, max_size=6)


@given(WEIGHTS, st.data())
def test_every_index_is_as_by_hand(weights, data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=len(weights), max_size=len(weights)))
    assert ids(mixed(weights, lengths), range(60)) == by_hand(weights, lengths, 60)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), "abababab"), ((3, 1), "aabaaaba"), ((0.1, 0.2, 0.1), "bacbbacb"), ((5, 1, 1), "aaabcaaaaabcaa")],
)
def test_small_mixtures(weights, expected):
    assert names(mixed(weights), range(len(expected))) == expected


@given(WEIGHTS, st.integers(0, 10**15))
def test_shares_are_close_to_the_weights_wherever_one_looks(weights, start):
    source, count = mixed(weights), 200
    found = Counter(names(source, range(start, start + count)))
    total = sum(Fraction(str(weight)) for weight in weights)
    for name, weight in zip(NAMES, weights, strict=False):
        assert abs(found[name] - count * Fraction(str(weight)) / total) <= 1 + len(weights)


def test_shares_are_exact_in_the_long_run():
    found = Counter(names(mixed((0.7, 0.2, 0.1)), range(10_000)))
    assert found == {"a": 7000, "b": 2000, "c": 1000}


def test_a_far_index_goes_on_where_the_one_before_was():
    source = mixed((0.123456789, 1 / 3, 2.5e-7), [10**4, 10**3, 3])
    seen: dict[str, int] = {}
    for place in range(10**12, 10**12 + 300):
        prompt = source.at(place)
        number = int(prompt.id.partition("/")[2])
        length = {"a": 10**4, "b": 10**3, "c": 3}[prompt.source]
        assert number == (seen.get(prompt.source, number - 1) + 1) % length
        seen[prompt.source] = number


@given(WEIGHTS, st.data())
def test_a_pass_is_the_shortest_that_sees_every_prompt(weights, data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=len(weights), max_size=len(weights)))
    weights = [max(weight, 0.5) for weight in weights]
    source = mixed(weights, lengths)
    assert len(set(ids(source))) == sum(lengths)
    assert len(set(ids(source, range(source.length - 1)))) == sum(lengths) - 1


def test_weights_like_the_lengths_make_a_pass_of_each_prompt_once():
    source = mixed((30, 10), [30, 10])
    assert source.length == 40
    assert max(Counter(ids(source)).values()) == 1
    assert mixed((1, 1), [100, 1000]).length == 2000


def test_each_source_is_shuffled_anew_at_its_own_epoch():
    source = mixed((2, 1), [4, 6], kind=lambda rows: Shuffled(rows, len(rows)))
    own = [prompt.id for prompt in map(source.at, range(300)) if prompt.source == "a"]
    epochs = [tuple(own[start : start + 4]) for start in range(0, 200, 4)]
    assert all(sorted(epoch) == ["a/0", "a/1", "a/2", "a/3"] for epoch in epochs)
    assert any(one != other for one, other in pairwise(epochs))
