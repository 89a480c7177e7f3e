"""Fingerprints are the sums of the specification, whichever implementation adds them up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.contracts import Change
from rillflow.errors import WeightsError
from rillflow.kernels.delta import reference
from rillflow.weights.fingerprint import fingerprint, gained, moved, plain
from soak import repetitions

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
MASK = 2**64 - 1


def slow(tensor: torch.Tensor, first_word: int = 0) -> int:
    """The definition, word by word."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    total = 0
    for number, at in enumerate(range(0, len(data), 8), first_word):
        z = int.from_bytes(data[at : at + 8], "little") + (number + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        total += z ^ z >> 31
    return total & MASK


def random(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, (count + 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype)[:count]


@given(st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 2**40))
@settings(max_examples=repetitions(30, 100), deadline=None)
def test_it_is_the_definition(dtype: torch.dtype, count: int, first_word: int) -> None:
    tensor = random(count, dtype, count)
    assert fingerprint(tensor, first_word) == plain(tensor, first_word) == slow(tensor, first_word)


def test_without_compiled_loops_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK", 64)
    for count in (0, 1, 255, 256, 1003):
        tensor = random(count, torch.bfloat16)
        assert plain(tensor, 7) == fingerprint(tensor, 7)
        assert plain(tensor[1:], 7) == fingerprint(tensor[1:], 7)  # not aligned to words


def test_empty_and_shapes() -> None:
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(3, 0)) == 0
    tensor = random(35, torch.bfloat16).reshape(5, 7)
    assert fingerprint(tensor) == fingerprint(tensor.reshape(-1)) == fingerprint(torch.nn.Parameter(tensor))
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous()) != fingerprint(tensor)
    assert fingerprint(tensor.reshape(-1)[3:]) == slow(tensor.reshape(-1)[3:])  # not aligned to words
    assert fingerprint(torch.ones((), dtype=torch.bfloat16)) == slow(torch.ones(1, dtype=torch.bfloat16))


def test_partial_sums_add_up() -> None:
    tensor = random(1003, torch.bfloat16)
    parts = [(0, 400), (400, 404), (404, 1000), (1000, 1003)]
    total = sum(fingerprint(tensor[start:end], start // 4) for start, end in parts)
    assert total % 2**64 == fingerprint(tensor)


def changed(count: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, Change, torch.Tensor]:
    rng = np.random.default_rng(seed)
    base = random(count, dtype, seed)
    index = torch.from_numpy(np.flatnonzero(rng.random(count) < rng.random()))
    new = base.clone()
    new[index] = random(count, dtype, seed + 1)[index]
    return base, Change(index, new[index]), new


@given(st.sampled_from(DTYPES), st.integers(0, 60), st.integers(0, 1000))
@settings(max_examples=repetitions(20, 60), deadline=None)
def test_moved_is_as_computed_anew(dtype: torch.dtype, count: int, seed: int) -> None:
    base, change, new = changed(count, dtype, seed)
    before = fingerprint(base, seed)
    assert moved(before, base, change, seed) == fingerprint(new, seed)
    assert moved(before, base, Change(None, new), seed) == fingerprint(new, seed)
    assert (before + gained(base, new, seed)) % 2**64 == fingerprint(new, seed)
    assert fingerprint(base, seed) == before


def test_moved_of_a_part_moves_the_whole() -> None:
    whole = random(100, torch.bfloat16)
    base, change, new = whole[40:].clone(), Change(torch.tensor([1, 59]), torch.ones(2).bfloat16()), whole.clone()
    new[torch.tensor([41, 99])] = 1.0
    assert moved(fingerprint(whole), base, change, first_word=10) == fingerprint(new)


def test_changes_of_another_tensor() -> None:
    base = random(10, torch.bfloat16)
    two = torch.tensor([1, 2])
    for change in (
        Change(None, base[:9]),
        Change(two, base[:3]),
        Change(two, base[:2].float()),
        Change(torch.tensor([3, 10]), base[:2]),
        Change(torch.tensor([-1, 2]), base[:2]),
    ):
        with pytest.raises(WeightsError, match="a change"):
            moved(0, base, change)
    with pytest.raises(WeightsError, match="was torch"):
        gained(base, base[:9])


def test_complex_numbers_of_16_bytes_have_none() -> None:
    with pytest.raises(WeightsError, match="no fingerprint"):
        fingerprint(torch.zeros(2, dtype=torch.complex128))
