"""Compiled attention of a decode step: what the plain operator gives, and for each row the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rillflow.engine.embedded import attention as attention_module
from rillflow.engine.embedded.attention import DecodeAttention
from rillflow.engine.embedded.cache import Columns, KVCache, make_cache
from rillflow.engine.embedded.forward import make_forward
from rillflow.engine.embedded.lanes import soften
from rillflow.weights.delta.jit import compiled

CONTEXT = 70
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 40, 64, CONTEXT)
SCALE = 0.3


def made(heads: int, size: int, *, slots: int = len(LENGTHS), dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(
        layers=2, slots=slots, heads=heads, context=CONTEXT, head_size=size, dtype=dtype, device=torch.device("cpu")
    )
    cache._kv_L2SKCD.normal_(generator=torch.Generator().manual_seed(1))
    return cache


def reading(lengths: Sequence[int]) -> Columns:
    """Rows write into the column that belongs to none."""
    return Columns(np.full(len(lengths), CONTEXT), np.array(lengths))


def heads_of_rows(rows: int, heads: int, group: int, size: int) -> torch.Tensor:
    return torch.randn(rows, heads * (group + 2), size, generator=torch.Generator().manual_seed(2))


def plain(cache: KVCache, layer: int, lengths: Sequence[int], qkv_RAD: torch.Tensor, group: int) -> torch.Tensor:
    """Row by row, in float64. Kernels in fp32 are about 1e-6 off: 5e-6 holds for any order of their sums."""
    query_RHD = qkv_RAD[:, : cache.heads * group].double()
    rows = []
    for row, length in enumerate(lengths):
        key, value = cache.read_rows(layer, slice(row, row + 1), length)
        own = query_RHD[row].view(1, cache.heads, group, -1)
        rows.append(F.scaled_dot_product_attention(own, key.double(), value.double(), scale=SCALE).reshape(-1))
    return torch.stack(rows).float()


@pytest.mark.parametrize(
    ("heads", "group", "size"), [(2, 2, 32), (3, 3, 64), (2, 1, 16), (1, 7, 8), (1, 5, 24), (2, 4, 80), (1, 2, 128)]
)
def test_it_is_what_the_plain_operator_gives(heads: int, group: int, size: int) -> None:
    cache, qkv_RAD = made(heads, size), heads_of_rows(len(LENGTHS), heads, group, size)
    attention = DecodeAttention(cache, heads * group, size)
    for layer in (0, 1):
        found = attention(layer, reading(LENGTHS), qkv_RAD, SCALE)
        torch.testing.assert_close(found, plain(cache, layer, LENGTHS, qkv_RAD, group), rtol=0, atol=5e-6)


def test_a_row_has_the_same_bits_whatever_others_are_with_it() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    attention = DecodeAttention(cache, 4, 32)
    whole = attention(1, reading(LENGTHS), qkv_RAD, SCALE).clone()
    for row in range(len(LENGTHS)):
        others = [17] * (row + 1)
        others[row] = LENGTHS[row]
        assert torch.equal(attention(1, reading(others), qkv_RAD[: row + 1], SCALE)[row], whole[row])


def test_columns_behind_a_row_do_not_matter() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    attention = DecodeAttention(cache, 4, 32)
    before = attention(0, reading(LENGTHS), qkv_RAD, SCALE).clone()
    for row, length in enumerate(LENGTHS):
        cache._kv_L2SKCD[:, :, row, :, length:] = torch.nan
    assert torch.equal(attention(0, reading(LENGTHS), qkv_RAD, SCALE), before)


@compiled
def softened(scores: Any, count: int) -> Any:
    return soften(scores, 0, count, np.float32(1))


@pytest.mark.parametrize("count", [1, 7, 8, 1000])
def test_powers_of_two_are_right_within_two_ten_millionths(count: int) -> None:
    scores = np.random.default_rng(count).uniform(-40, 20, count + 8).astype(np.float32)
    expected = np.exp2((scores[:count] - scores[:count].max()).astype(np.float64))
    total = softened(scores, count)
    # Neighbouring fp32 numbers are up to 1.2e-7 apart. With or without fused multiply-add one such step may be lost.
    np.testing.assert_allclose(scores[:count], expected, rtol=2e-7)
    assert total == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.parametrize("factor", [0.0, 1e3, 1e30])
def test_scores_of_any_size_give_finite_sums(factor: float) -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32) * factor
    found = DecodeAttention(cache, 4, 32)(0, reading(LENGTHS), qkv_RAD, SCALE)
    assert found.isfinite().all()
    torch.testing.assert_close(found, plain(cache, 0, LENGTHS, qkv_RAD, 2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """The engine finds broken weights by it."""
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    qkv_RAD[3, 1, 5] = bad
    found = DecodeAttention(cache, 4, 32)(0, reading(LENGTHS), qkv_RAD, SCALE).view(-1, 4, 32)
    assert not found[3, 1].isfinite().any()
    found[3, 1] = 0
    assert found.isfinite().all()


def test_it_is_compiled_before_the_first_step() -> None:
    cache = made(2, 32)
    attention = DecodeAttention(cache, 4, 32)
    kernel: Any = attention_module._kernel(2, 32)
    assert len(kernel.signatures) == 1
    cache.compiled = True
    batch = cache.decode_batch(np.zeros(3, np.int32), np.array([4, 5, 6], np.int32), np.ones(3, np.bool_))
    assert batch.columns is not None
    attention(0, batch.columns, heads_of_rows(3, 2, 2, 32), SCALE)
    assert len(kernel.signatures) == 1


def test_a_new_key_and_value_are_written_before_they_are_read() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(3, 2, 2, 32)
    before = cache._kv_L2SKCD.clone()
    columns, lengths = [0, 8, CONTEXT], [1, 9, 4]
    found = DecodeAttention(cache, 4, 32)(1, Columns(np.array(columns), np.array(lengths)), qkv_RAD, SCALE)
    for row, column in enumerate(columns):
        before[1, :, row, :, column] = qkv_RAD[row, 4:].view(2, 2, 32)
    assert torch.equal(cache._kv_L2SKCD, before)
    torch.testing.assert_close(found, plain(cache, 1, lengths, qkv_RAD, 2), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("size", "dtype"), [(12, torch.float32), (32, torch.bfloat16)])
def test_other_sizes_and_numbers_are_left_to_the_plain_operator(size: int, dtype: torch.dtype) -> None:
    cache = made(2, size, dtype=dtype)
    assert not cache.compiles
    batch = cache.decode_batch(np.zeros(3), np.array([4, 5, 6]), np.ones(3, np.bool_))
    assert batch.columns is None
    assert batch.mask_RTE is not None
    assert batch.stretches


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_a_step_gives_what_the_model_gives(make_model: Callable[..., Any], family: str) -> None:
    """Also beside a row that is not ready, which changes nothing of its own."""
    lengths = [5, 90, 7, 40]
    rows = [torch.randint(0, 97, (length + 1,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    model = make_model(family)
    with torch.inference_mode():
        expected = torch.stack([model(row[None]).logits[0, -1] for row in rows])
        cache = make_cache(model, 4, 200)
        forward = make_forward(model, cache)
        for slot, row in enumerate(rows):
            ids, zero = row[None, :-1].numpy(), np.zeros(1, np.int64)
            forward(cache.prefill_batch(np.array([slot]), ids, zero, np.array([len(row) - 1])))
        last, ready = np.array([int(row[-1]) for row in rows]), np.array([True, True, False, True])
        kept = cache._kv_L2SKCD[:, :, 2, :, : cache.context].clone()
        batch = cache.decode_batch(last, np.where(ready, lengths, 0), ready)
        assert (batch.columns is not None) is (batch.mask_RTE is None) is (family != "mistral")
        torch.testing.assert_close(forward(batch)[ready], expected[ready], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache._kv_L2SKCD[:, :, 2, :, : cache.context], kept)
