"""The decoder of deltas inside servers gives the bits that were encoded, and refuses everything else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.engine.servers.inside import rillflow_delta
from rillflow.engine.servers.inside.rillflow_delta import LAYOUTS, DeltaError, Piece, apply_all
from rillflow.kernels.delta import format
from rillflow.weights import delta
from soak import repetitions

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def pair(dtype: torch.dtype, count: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    base = (0.02 * torch.randn(count, generator=source)).to(dtype)
    moved = base * (1 + 0.02 * torch.randn(count, generator=source))
    return base, torch.where(torch.rand(count, generator=source) < share, moved.to(dtype), base)


def random_bits(dtype: torch.dtype, count: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN, infinities and denormals among them, in many classes, with changes of every length."""
    source, kind = torch.Generator().manual_seed(1), LAYOUTS[dtype].integer
    base, noise = (torch.randint(-(2**31), 2**31, (count,), generator=source).to(kind) for _ in range(2))
    return base.view(dtype), torch.where(torch.rand(count, generator=source) < share, noise, base).view(dtype)


def decoded(base: torch.Tensor, data: bytes | memoryview) -> torch.Tensor:
    weights_N = base.clone()
    apply_all([Piece(weights_N, memoryview(data))])
    return weights_N


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 1000, 70_001])
def test_weights_become_what_was_encoded(dtype: torch.dtype, share: float, count: int) -> None:
    base, new = pair(dtype, count, share)
    assert bits(decoded(base, delta.encode(base, new).data)) == bits(new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_any_bits_become_any_others(dtype: torch.dtype, share: float) -> None:
    base, new = random_bits(dtype, 30_000, share)
    assert bits(decoded(base, delta.encode(base, new).data)) == bits(new)


@settings(max_examples=repetitions(20, 50), deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5000), share=st.floats(0, 1))
def test_weights_of_any_number_and_share(seed: int, count: int, share: float) -> None:
    base, new = pair(torch.bfloat16, count, share, seed)
    assert bits(decoded(base, delta.encode(base, new).data)) == bits(new)


def test_many_segments_are_decoded_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of several deltas share a batch, and a delta may go on in the next one."""
    from rillflow.weights import delta

    monkeypatch.setattr(delta, "SEGMENT_LOG2", 12)
    monkeypatch.setattr(delta, "_DENSE_LOG2", 12)
    monkeypatch.setattr(rillflow_delta, "_BATCH", 3 << 12)
    pairs = [pair(torch.bfloat16, count, 0.1, seed) for seed, count in enumerate((9000, 100, 20_000, 4096))]
    pairs[2][1][:4096] = torch.randn(4096).bfloat16()  # a raw segment
    pairs[2][1][4096:8192] = pairs[2][0][4096:8192]  # one in which nothing changes
    weights = [base.clone() for base, _ in pairs]
    done: list[int] = []
    apply_all(
        Piece(weights[number], memoryview(delta.encode(base, new).data), lambda number=number: done.append(number))
        for number, (base, new) in enumerate(pairs)
    )
    assert [bits(one) for one in weights] == [bits(new) for _, new in pairs]
    assert done == [0, 1, 2, 3]


def test_nothing_is_done_for_no_pieces() -> None:
    apply_all([])


def test_a_delta_of_other_weights_is_refused() -> None:
    base, new = pair(torch.bfloat16, 1000, 0.1)
    data = delta.encode(base, new).data
    for other in (base[:999], base.half(), base.float()):
        with pytest.raises(DeltaError, match=r"1000 weights of dtype 1"):
            decoded(other, data)
    with pytest.raises(DeltaError, match="header"):
        decoded(base, b"RFD1" + bytes(data)[4:])


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_damaged_bytes_raise_and_leave_no_array(share: float) -> None:
    """An index that leaves its array raises IndexError on the host; on a GPU it would end the server."""
    base, new = pair(torch.bfloat16, 5000, share)
    good, source = bytes(delta.encode(base, new).data), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(38, len(damaged))] ^= 1 << source.randrange(8)
        try:
            decoded(base, bytes(damaged[: len(damaged) - source.choice((0, 0, 0, 1, 40))]))
        except DeltaError:
            refused += 1
    assert refused > 50


def test_the_layouts_are_those_of_the_format() -> None:
    for dtype, layout in LAYOUTS.items():
        theirs = format.LAYOUTS[dtype]
        assert layout[:4] == (theirs.code, theirs.width, theirs.exponents, theirs.mantissa)
    assert LAYOUTS.keys() == format.LAYOUTS.keys()
