"""One copy of two versions finds the difference that two copies do, bit for bit."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from rillflow.weights.delta_file import Part
from rillflow.weights.in_place import InPlace
from rillflow.weights.previous import Difference, Previous, sums_of

# Two are more than a span; the odd ones put those behind them beside whole words.
SIZES = {"wide": 600_000, "odd": 1_003, "norm": 64, "one": 1, "late": 300_001, "three": 3}
NEAR, FAR = 1e-4, 1.0


def masters() -> dict[Part, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    firsts = {"late": 400}  # a shard that does not begin its tensor
    return {
        Part(name, firsts.get(name, 0), size): torch.randn(size, generator=generator) for name, size in SIZES.items()
    }


def change(weights: dict[Part, torch.Tensor], every: int, by: float, number: int) -> None:
    for part, tensor in weights.items():
        generator = torch.Generator().manual_seed(number + part.weights)
        tensor[number % 3 :: every] += by * torch.randn(tensor[number % 3 :: every].shape, generator=generator)


def cast(weights: dict[Part, torch.Tensor], dtype: torch.dtype) -> dict[Part, torch.Tensor]:
    return {part: tensor.to(dtype, copy=True) for part, tensor in weights.items()}


def same(found: Difference, expected: Difference) -> None:
    assert [(piece.parts, piece.kind, bytes(piece.data)) for piece in found.pieces] == [
        (piece.parts, piece.kind, bytes(piece.data)) for piece in expected.pieces
    ]
    assert found[1:] == expected[1:]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("threads", "run"), [(1, 1 << 22), (3, 1 << 17)])
def test_it_finds_what_two_copies_find(
    dtype: torch.dtype, threads: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("rillflow.weights.delta_file.RUN", run)  # large tensors are runs by themselves, or are not
    weights, one, two = masters(), InPlace(), Previous()
    one.take(weights, dtype, keep=False)
    sums = sums_of(one.parts)
    one.hold(0, sums)
    two.hold(cast(weights, dtype), {}, 0, sums)
    steps = [(100, NEAR), (10_000, FAR), (1, FAR), (2, NEAR), (1 << 30, 0.0), (50, FAR)]
    for version, (every, by) in enumerate(steps, start=1):
        change(weights, every, by, version)
        one.take(weights, dtype, keep=True)
        assert one.version == version - 1
        expected = cast(weights, dtype)
        for tensor in weights.values():
            tensor.add_(0.5)  # training goes on
        found, known = one.difference(), two.difference(expected, float("inf"))
        assert known is not None
        same(found, known)
        assert all(torch.equal(bits(one.parts[part]), bits(tensor)) for part, tensor in expected.items())
        one.hold(version, found.sums, found.runs)
        two.hold(expected, {}, version, known.sums, known.runs)
        for tensor in weights.values():
            tensor.sub_(0.5)


def test_what_was_taken_and_not_published_is_undone() -> None:
    weights, one, two = masters(), InPlace(), Previous()
    one.take(weights, torch.bfloat16, keep=False)
    two.hold(cast(weights, torch.bfloat16), {}, 4, sums_of(one.parts))
    one.hold(4, sums_of(one.parts))
    for number in (1, 2):
        change(weights, 7 * number, FAR, number)
        one.take(weights, torch.bfloat16, keep=True)
    known = two.difference(cast(weights, torch.bfloat16), float("inf"))
    assert known is not None
    same(one.difference(), known)


def test_without_the_version_before_there_is_no_difference() -> None:
    one = InPlace()
    one.take(masters(), torch.bfloat16, keep=False)
    one.hold(1, {})
    one.take(masters(), torch.bfloat16, keep=False)
    assert one.version is None
    with pytest.raises(AssertionError):
        one.difference()


def test_few_changes_take_little_memory() -> None:
    part, one = Part("wide", 0, 1 << 21), InPlace()
    weights = {part: torch.randn(1 << 21, generator=torch.Generator().manual_seed(1))}
    one.take(weights, torch.bfloat16, keep=False)
    one.hold(0, {})
    weights[part][::200] += 1
    tracemalloc.start()
    one.take(weights, torch.bfloat16, keep=True)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    copy = 2 << 21
    assert kept < copy / 20
    assert peak < copy / 3, "a span at once"
