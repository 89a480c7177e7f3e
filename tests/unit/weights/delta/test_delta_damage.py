"""Damaged deltas and other bases are refused before anything is applied, and no bytes can do harm."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash
from delta_helpers import DTYPES, bits_of, sparse_pair

from rillflow.errors import CorruptData, RillflowError, WeightsError
from rillflow.weights.delta import apply, apply_, encode, file

HEADER = 46
BODY = HEADER + 8


def flip(rng: np.random.Generator, delta: bytes) -> bytes:
    made = bytearray(delta)
    for at in rng.integers(0, 8 * len(delta), rng.integers(1, 4)):
        made[at // 8] ^= 1 << int(at % 8)
    return bytes(made)


def cut(rng: np.random.Generator, delta: bytes) -> bytes:
    start = int(rng.integers(0, len(delta)))
    return delta[:start] + delta[start + int(rng.integers(1, len(delta) - start + 1)) :]


def swap(rng: np.random.Generator, delta: bytes) -> bytes:
    a, b, c = sorted(int(at) for at in rng.integers(0, len(delta) + 1, 3))
    return delta[:a] + delta[b:c] + delta[a:b] + delta[c:]


def scribble(rng: np.random.Generator, delta: bytes) -> bytes:
    start = int(rng.integers(0, len(delta)))
    noise = rng.bytes(int(rng.integers(1, 40)))
    return delta[:start] + noise + delta[start + len(noise) :]


def noise(rng: np.random.Generator, delta: bytes) -> bytes:
    return rng.bytes(int(rng.integers(0, len(delta))))


DAMAGES: list[Callable[[np.random.Generator, bytes], bytes]] = [flip, cut, swap, scribble, noise]


def sealed(delta: bytes) -> bytes:
    """A delta with the checksum it should have."""
    checksum = xxhash.xxh3_64_intdigest(delta[:HEADER] + delta[BODY:])
    return delta[:HEADER] + struct.pack("<Q", checksum) + delta[BODY:]


def test_each_of_10000_damaged_copies_is_refused() -> None:
    rng = np.random.default_rng(0)
    base, new = sparse_pair()
    delta = encode(base, new)
    target, before = base.clone(), bits_of(base)
    refused = 0
    while refused < 10_000:
        damaged = DAMAGES[refused % len(DAMAGES)](rng, delta)
        if damaged == delta:
            continue
        with pytest.raises(RillflowError) as caught:
            apply_(target, damaged)
        assert caught.value.hint
        refused += 1
    assert bits_of(target) == before
    assert bits_of(apply_(target, delta)) == bits_of(new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_under_a_right_checksum_is_refused_or_harmless(dtype: torch.dtype) -> None:
    """Every length, count and index is checked on its own: who can make checksums cannot make a reader stray."""
    rng = np.random.default_rng(1)
    base, new = sparse_pair(3000, dtype)
    delta = encode(base, new)
    target, before = base.clone(), bits_of(base)
    for number in range(1500):
        damaged = delta[:BODY] + DAMAGES[number % 4](rng, delta[BODY:])
        try:
            result = apply(target, sealed(damaged))
        except (CorruptData, WeightsError):
            continue
        assert bits_of(result) == bits_of(new)  # e.g. damage of the padding
    assert bits_of(target) == before


def test_random_tables_under_a_right_checksum() -> None:
    rng = np.random.default_rng(2)
    base, new = sparse_pair(200)
    delta = encode(base, new)
    for _ in range(1500):
        content = bytes([int(rng.integers(0, 3))]) + rng.bytes(int(rng.integers(0, 60)))
        body = struct.pack("<BI", 1, len(content)) + content
        with pytest.raises(CorruptData):
            apply(base, sealed(delta[:BODY] + body))


def test_damaged_header_under_a_right_checksum() -> None:
    base, new = sparse_pair(200)
    delta = encode(base, new)
    for at in range(HEADER):
        for bit in range(8):
            damaged = bytearray(delta)
            damaged[at] ^= 1 << bit
            try:
                result = apply(base, sealed(bytes(damaged)))
            except (CorruptData, WeightsError):
                continue
            assert at == 5, "only the size of segments may differ, since there is one"
            assert bits_of(result) == bits_of(new)


def test_another_base_is_refused() -> None:
    base, new = sparse_pair()
    delta = encode(base, new)
    other = base.clone()
    other[17] = 3.0
    for wrong in (other, base[:-1], base.half(), base.float(), new):
        before = bits_of(wrong)
        with pytest.raises(WeightsError, match="another base") as caught:
            apply_(wrong, delta)
        assert "pull" in caught.value.hint
        assert bits_of(wrong) == before


def test_another_result_is_refused() -> None:
    base, new = sparse_pair()
    delta = encode(base, new)
    start = HEADER - 16
    with pytest.raises(CorruptData, match="other weights"):
        apply(base, sealed(delta[:start] + bytes(16) + delta[HEADER:]))


def test_a_hash_is_of_pieces() -> None:
    """As the format says, so that pieces can be hashed at the same time."""
    bits = np.arange(70_000, dtype=np.uint16)
    data = bits.tobytes()
    pieces = b"".join(xxhash.xxh3_128_digest(data[at : at + 65536]) for at in range(0, len(data), 65536))
    assert file.fingerprint(bits) == xxhash.xxh3_128_digest(pieces)
