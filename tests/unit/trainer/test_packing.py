"""Packing and the forward pass on packed rows."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import random_rows, random_samples, small_model

from rillflow.errors import CorruptData
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import MicroBatch, Plan, collate, input_length, pack

CPU = torch.device("cpu")


def micro_of(rows: Rows, index: list[int]) -> MicroBatch:
    count = len(rows.length_R)
    plan = Plan(rows, input_length(rows), np.arange(count, dtype=float), np.ones(count))
    return collate(plan, np.array(index), CPU)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 200), st.booleans())
def test_every_row_once_and_within_the_budget(lengths: list[int], budget: int, in_order: bool) -> None:
    length_R = np.array(lengths, dtype=np.int64)
    packs = pack(length_R, budget, in_order=in_order)
    placed = [row for rows in packs for row in rows.tolist()]
    assert sorted(placed) == [row for row, length in enumerate(lengths) if length]
    assert not in_order or placed == sorted(placed)
    for rows in packs:
        assert len(rows) == 1 or len(rows) * length_R[rows].max() <= budget
    again = pack(length_R, budget, in_order=in_order)
    assert all(np.array_equal(a, b) for a, b in zip(packs, again, strict=True))


@pytest.mark.parametrize("budget", [800, 8192])
def test_sorting_pads_less(budget: int) -> None:
    length_R = np.random.default_rng(0).integers(1, 100, 64)

    def padded(*, in_order: bool) -> int:
        packs = pack(length_R, budget, in_order=in_order)
        return sum(len(rows) * int(length_R[rows].max()) for rows in packs)

    assert padded(in_order=False) < 0.75 * padded(in_order=True)
    assert padded(in_order=False) < 1.3 * length_R.sum()


def test_collate_puts_each_trained_token_behind_its_own_context() -> None:
    rows = random_rows(3)
    micro = micro_of(rows, [5, 0, 7])
    width = micro.tokens_BL.shape[1]
    at = 0
    for place, row in enumerate([5, 0, 7]):
        start = rows.start_R[row]
        for t in range(rows.length_R[row]):
            if rows.mask_N[start + t]:
                assert micro.target_T[at] == rows.tokens_N[start + t]
                assert micro.select_T[at] == place * width + t - 1
                assert micro.old_T[at] == rows.old_N[start + t]
                assert micro.advantage_T[at] == row
                assert micro.tokens_BL[place, t - 1] == rows.tokens_N[start + t - 1]
                at += 1
    assert at == len(micro.target_T)


@pytest.mark.parametrize("tied", [True, False])
def test_selected_log_probs_are_those_of_a_full_softmax_of_the_row_alone(tied: bool) -> None:
    model = small_model(tied=tied)
    rows = random_rows(4)
    temperature_N = np.random.default_rng(0).choice(np.array([1.0, 0.7, 1.3], "<f4"), len(rows.mask_N))
    rows = replace(rows, temperature_N=temperature_N)
    everyone = list(range(len(rows.length_R)))
    micro = micro_of(rows, everyone)
    with torch.no_grad():
        new_T, entropy_T = PolicyForward(model)(micro)
        at = 0
        for row in everyone:
            start, end = rows.start_R[row], rows.start_R[row] + rows.length_R[row]
            ids = torch.from_numpy(rows.tokens_N[start:end].astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0]
            for t in np.flatnonzero(rows.mask_N[start:end]):
                alone = torch.log_softmax(logits[t - 1] / float(temperature_N[start + t]), -1)
                torch.testing.assert_close(new_T[at], alone[ids[t]], rtol=1e-5, atol=1e-5)
                entropy = -(alone.exp() * alone).sum()
                torch.testing.assert_close(entropy_T[at], entropy, rtol=1e-5, atol=1e-5)
                at += 1
    assert at == len(new_T)


def test_a_model_without_a_head_of_its_own_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(4)
    micro = micro_of(rows, [0, 1, 2])
    expected, _ = PolicyForward(small_model())(micro)
    model = small_model()
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    torch.testing.assert_close(PolicyForward(model)(micro)[0], expected)


def test_the_models_own_use_is_left_alone() -> None:
    model = small_model()
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    forward = PolicyForward(model)
    forward(micro_of(random_rows(1), [0]))
    assert torch.equal(model(input_ids=ids).logits, before)


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
    with pytest.raises(CorruptData, match="rows were read"):
        make_rows(samples, payload[:-1])
    del payload[2]["logprobs"]
    with pytest.raises(CorruptData, match=r"g0p2.*logprobs"):
        make_rows(samples, payload)
