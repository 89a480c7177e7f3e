"""Payloads: one obvious plain form or a refusal that names the row and the key; the result can be sent."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.dataflow.sources.rows import plain
from rillflow.errors import DataError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]], dtype=np.uint8), [[1, 2], [3, 4]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([{"a": np.int8(1)}, None], dtype=object), [{"a": 1}, None]),
        (np.array(7), 7),
        (np.datetime64("2024-05-06T07:08"), "2024-05-06T07:08"),
        (np.array(["2024-05-06"], dtype="datetime64[D]"), ["2024-05-06"]),
        (datetime(2024, 5, 6, 7, 8, tzinfo=UTC), "2024-05-06T07:08:00+00:00"),
        (date(2024, 5, 6), "2024-05-06"),
        (time(7, 8), "07:08:00"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: "a", np.str_("b"): ()}, {1: "a", "b": []}),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_what_has_one_obvious_form_gets_it(value, expected):
    found = plain({"key": value}, "row 1")
    assert found == {"key": expected}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found


def nested():
    loop: list[object] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Decimal("1.5"), "is of type Decimal"),
        (b"bytes", "is of type bytes"),
        ({1, 2}, "is of type set"),
        (timedelta(1), "is of type timedelta"),
        (UUID(int=1), "is of type UUID"),
        (1j, "is of type complex"),
        (2**64, "integer of more than 64 bits"),
        (np.complex64(1), "numpy's type complex64"),
        (np.bytes_(b"a"), "numpy's type"),
        (np.longdouble(1), "numpy's type"),
        (np.timedelta64(1, "s"), "numpy's type timedelta64"),
        (np.array(object(), dtype=object), "numpy's type object"),
        ({(1, 2): 3}, "a key of type tuple"),
    ],
)
def test_the_rest_is_refused_by_row_and_key(value, message):
    with pytest.raises(DataError, match=f"row 7 cannot be sent to a node: list\\[1\\]\\.key.*{message}") as caught:
        plain({"list": [0, {"key": value}]}, "row 7")
    assert caught.value.hint


def test_keys_of_the_payload_are_text_and_nesting_ends():
    with pytest.raises(DataError, match="1 is a key of type int"):
        plain({1: 2}, "row 1")
    with pytest.raises(DataError, match="nested too deeply"):
        plain({"loop": nested()}, "row 1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_what_is_plain_stays_as_it_is(payload):
    found = plain(payload, "row 1")
    assert repr(found) == repr(payload)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert repr(sent) == repr(payload)
    assert plain({"nan": math.nan}, "row 1")["nan"] is not None
