"""Epochs: permutations that the seed fixes, the same in every release."""

from __future__ import annotations

from source_support import ids, prompts

from rillflow.dataflow.sources import InOrder, Shuffled


def test_shuffled_epochs_are_permutations_fixed_by_the_seed():
    rows = prompts(20)

    def epoch(source, number):
        return ids(source, range(number * 20, number * 20 + 20))

    source, same, other = Shuffled(rows, 1), Shuffled(rows, 1), Shuffled(rows, 2)
    for number in range(3):
        assert sorted(epoch(source, number), key=int) == [row.id for row in rows]
    assert epoch(source, 7) == epoch(same, 7)
    assert epoch(source, 0) != epoch(source, 1)
    assert epoch(source, 0) != epoch(other, 0)
    assert epoch(InOrder(rows), 5) == [row.id for row in rows]


ORDER = ["4", "5", "7", "0", "1", "3", "2", "6"]


def test_the_order_never_changes_between_releases():
    assert ids(Shuffled(prompts(8), 0)) == ORDER
