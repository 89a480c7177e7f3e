"""Compiled attention of a decode step in an engine: for each row the same bits in any batch, and the model's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rillflow import kernels
from rillflow.engine.embedded.cache import Columns, KVCache, make_cache
from rillflow.engine.embedded.forward import make_forward
from rillflow.kernels.decode import Turned, attend, decode_loop, reference_attend

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


def found_by(cache: KVCache, layer: int, columns: Columns, qkv_RAD: torch.Tensor) -> torch.Tensor:
    return attend(qkv_RAD.clone(), unturned(qkv_RAD.shape[-1]), *cache.arrays(layer), columns, SCALE)


def unturned(size: int) -> Turned:
    return Turned(torch.empty(0, size), 0.0, torch.ones(CONTEXT, size), torch.zeros(CONTEXT, size))


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


def test_each_layer_reads_its_own_columns() -> None:
    cache, qkv_RAD = made(3, 64), heads_of_rows(len(LENGTHS), 3, 3, 64)
    for layer in (0, 1):
        found = found_by(cache, layer, reading(LENGTHS), qkv_RAD)
        torch.testing.assert_close(found, plain(cache, layer, LENGTHS, qkv_RAD, 3), rtol=0, atol=5e-6)


def test_a_row_has_the_same_bits_whatever_others_are_with_it() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    whole = found_by(cache, 1, reading(LENGTHS), qkv_RAD)
    for row in range(len(LENGTHS)):
        others = [17] * (row + 1)
        others[row] = LENGTHS[row]
        assert torch.equal(found_by(cache, 1, reading(others), qkv_RAD[: row + 1])[row], whole[row])


def test_columns_behind_a_row_do_not_matter() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    before = found_by(cache, 0, reading(LENGTHS), qkv_RAD)
    for row, length in enumerate(LENGTHS):
        cache._kv_L2SKCD[:, :, row, :, length:] = torch.nan
    assert torch.equal(found_by(cache, 0, reading(LENGTHS), qkv_RAD), before)


@pytest.mark.parametrize("factor", [0.0, 1e3, 1e30])
def test_scores_of_any_size_give_finite_sums(factor: float) -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32) * factor
    found = found_by(cache, 0, reading(LENGTHS), qkv_RAD)
    assert found.isfinite().all()
    torch.testing.assert_close(found, plain(cache, 0, LENGTHS, qkv_RAD, 2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """The engine finds broken weights by it."""
    cache, qkv_RAD = made(2, 32), heads_of_rows(len(LENGTHS), 2, 2, 32)
    qkv_RAD[3, 1, 5] = bad
    found = found_by(cache, 0, reading(LENGTHS), qkv_RAD).view(-1, 4, 32)
    assert not found[3, 1].isfinite().any()
    found[3, 1] = 0
    assert found.isfinite().all()


def test_it_is_compiled_before_the_first_step(make_model: Callable[..., Any]) -> None:
    model = make_model("qwen3")
    cache = make_cache(model, 4, 200)
    forward = make_forward(model, cache)
    known = len(decode_loop.signatures)
    assert known
    batch = cache.decode_batch(np.zeros(3, np.int32), np.array([4, 5, 6], np.int32), np.ones(3, np.bool_))
    with torch.inference_mode():
        forward(batch)
    assert len(decode_loop.signatures) == known


def test_a_new_key_and_value_are_written_before_they_are_read() -> None:
    cache, qkv_RAD = made(2, 32), heads_of_rows(3, 2, 2, 32)
    before = cache._kv_L2SKCD.clone()
    columns, lengths = [0, 8, CONTEXT], [1, 9, 4]
    found = found_by(cache, 1, Columns(np.array(columns), np.array(lengths)), qkv_RAD)
    for row, column in enumerate(columns):
        before[1, :, row, :, column] = qkv_RAD[row, 4:].view(2, 2, 32)
    assert torch.equal(cache._kv_L2SKCD, before)
    torch.testing.assert_close(found, plain(cache, 1, lengths, qkv_RAD, 2), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("switch", "dtype"), [("off", torch.float32), ("on", torch.bfloat16)])
def test_torch_computes_other_dtypes_and_everything_without_kernels(
    monkeypatch: pytest.MonkeyPatch, switch: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, switch)
    cache = made(2, 32, dtype=dtype)
    assert not cache.compiles
    batch = cache.decode_batch(np.zeros(3), np.array([4, 5, 6]), np.ones(3, np.bool_))
    assert batch.columns is None
    assert batch.mask_RTE is not None
    assert batch.stretches


def test_torch_reads_a_window_and_shares_work_among_several_threads() -> None:
    size = {"layers": 1, "slots": 2, "heads": 1, "context": CONTEXT, "head_size": 8}
    plain = {**size, "dtype": torch.float32, "device": torch.device("cpu")}
    assert KVCache(**plain).compiles
    assert not KVCache(**plain, window=9).compiles
    torch.set_num_threads(2)
    try:
        assert not KVCache(**plain).compiles
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_rotated_and_stored(normed: bool) -> None:
    """Two fp32 sums in different orders are about 1e-6 of the largest value apart."""
    generator, size, group = torch.Generator().manual_seed(3), 32, 2
    qkv_RAD = heads_of_rows(len(LENGTHS), 2, group, size)
    angles = torch.rand(CONTEXT, size // 2, generator=generator) * 6
    sin_PD, cos_PD = torch.cat([-angles.sin(), angles.sin()], -1), torch.cat([angles.cos()] * 2, -1)
    weight_AD = torch.rand(2 * (group + 1) if normed else 0, size, generator=generator)
    turned, columns = Turned(weight_AD, 1e-6, cos_PD, sin_PD), Columns(np.array(LENGTHS) - 1, np.array(LENGTHS))
    both = []
    for function in (attend, reference_attend):
        cache = made(2, size)
        found = function(qkv_RAD.clone(), turned, *cache.arrays(0), columns, SCALE)
        both.append((found, cache._kv_L2SKCD))
    for mine, reference in zip(*both, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)
