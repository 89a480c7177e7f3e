"""The ledger's metadata of samples, compared with the columns that were read."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from trainer_helpers import random_samples

from rillflow.errors import CorruptData
from rillflow.trainer.batches import make_rows


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("tokens", lambda a: a[:-1]),
        ("tokens", lambda a: -a - 1),
        ("mask", np.zeros_like),
        ("mask", lambda a: np.roll(a, -1)),
        ("logprobs", lambda a: np.full_like(a, np.nan)),
        ("logprobs", lambda a: a[:0]),
    ],
)
def test_payload_that_does_not_fit_is_refused(column: str, change: object) -> None:
    samples, payload = random_samples(0)
    payload[5] = payload[5] | {column: change(payload[5][column])}  # type: ignore[operator]
    with pytest.raises(CorruptData, match="g1p1"):
        make_rows(samples, payload)


@pytest.mark.parametrize("field", ["reward", "group_mean", "group_std"])
def test_numbers_that_are_none_are_refused(field: str) -> None:
    samples, payload = random_samples(0)
    samples[3] = msgspec.structs.replace(samples[3], **{field: float("nan")})
    with pytest.raises(CorruptData, match="g0p3"):
        make_rows(samples, payload)


def test_tokens_that_no_temperature_explains_are_scored_untempered() -> None:
    samples, payload = random_samples(0)
    greedy = payload[0] | {
        "raw_logprobs": np.full(len(payload[0]["mask"]), -2.0, "<f4"),
        "temperatures": np.zeros(len(payload[0]["mask"]), "<f4"),
    }
    rows = make_rows(samples[:2], [greedy, payload[1] | {"temperatures": payload[1]["temperatures"] * 0.5}])
    second = rows.start_R[1]
    assert set(rows.old_N[:second]) == {-2.0}
    assert set(rows.temperature_N[:second]) == {1.0}
    assert np.array_equal(rows.old_N[second:], payload[1]["logprobs"])
    assert set(rows.temperature_N[second:]) == {0.5}


def test_a_missing_column_or_row_is_refused() -> None:
    samples, payload = random_samples(0)
    with pytest.raises(CorruptData, match="rows for"):
        make_rows(samples, payload[:-1])
    del payload[2]["logprobs"]
    with pytest.raises(CorruptData, match=r"g0p2.*logprobs"):
        make_rows(samples, payload)
