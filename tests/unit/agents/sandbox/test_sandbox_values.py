"""The wire between candidate and judge: plain values come out as they went in; bytes cannot do anything."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, namedtuple
from contextlib import suppress
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.agents.sandbox.inside.values import DEPTH, NotPlain, Ref, pack, unpack

_atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
_atoms |= st.text(max_size=5) | st.binary(max_size=5)
_keys = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.booleans())
_values = st.recursive(
    _atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.sets(_keys, max_size=3)
        | st.frozensets(_keys, max_size=3)
    ),
    max_leaves=6,
)
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(_values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    again = unpack(pack(value))
    assert again == value
    assert type(again) is type(value)


@quick
@given(st.binary())
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with suppress(NotPlain):
        unpack(data)


@quick
@given(_values, st.data())
def test_damaged_bytes_are_a_value_or_an_error(value: Any, data: st.DataObject) -> None:
    body = bytearray(pack(value))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(NotPlain):
        unpack(bytes(body))


def test_subclasses_become_what_they_are_subclasses_of() -> None:
    class Always(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    kind = IntEnum("kind", "one")
    for value, plain in (
        (Always(3), 3),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (kind.one, 1),
    ):
        again = unpack(pack(value))
        assert type(again) is type(plain)
        assert again == plain


def test_other_plain_things_are_sent() -> None:
    assert unpack(pack(range(1, 10, 3))) == range(1, 10, 3)
    assert unpack(pack([int, dict])) == [int, dict]
    assert list(unpack(pack(map(str, [1, 2]), keep=lambda _: 0))) == ["1", "2"]
    assert list(unpack(pack(iter([1, 2])))) == [1, 2]
    assert unpack(pack(10**5000)) == 10**5000


def test_other_objects_stay_and_are_sent_as_numbers() -> None:
    kept: list[object] = []

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    thing = object()
    (number,) = unpack(pack([thing], keep))
    assert isinstance(number, Ref)
    assert number._rillflow_number == 0
    assert kept == [thing]
    with pytest.raises(NotPlain, match="cannot be sent"):
        pack([thing])


def test_depth_is_bounded_on_both_sides() -> None:
    value: list[Any] = []
    for _ in range(DEPTH + 1):
        value = [value]
    with pytest.raises(NotPlain, match="nested"):
        pack(value)
    with pytest.raises(NotPlain, match="nested"):
        unpack(b"l\x01\0\0\0" * 100_000 + b"N")
    assert unpack(pack([[1]]), depth=DEPTH - 2) == [[1]]
    with pytest.raises(NotPlain, match="nested"):
        unpack(pack([[1]]), depth=DEPTH - 1)


def test_iterators_are_bounded() -> None:
    with pytest.raises(NotPlain, match="more than"):
        pack(itertools.count())
