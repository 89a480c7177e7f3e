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
from rillflow.kernels.delta import format
from rillflow.weights import delta
from rillflow.weights.delta import apply, apply_, decode, encode
from rillflow.weights.fingerprint import fingerprint, moved

HEADER = 30
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
    delta = encode(base, new).data
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
    """Every length, count and index is checked: a writer of valid checksums cannot make a reader leave its bounds."""
    rng = np.random.default_rng(1)
    base, new = sparse_pair(3000, dtype)
    delta = encode(base, new).data
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
    delta = encode(base, new).data
    for _ in range(1500):
        content = bytes([int(rng.integers(0, 3))]) + rng.bytes(int(rng.integers(0, 60)))
        body = struct.pack("<BI", 1, len(content)) + content
        with pytest.raises(CorruptData):
            apply(base, sealed(delta[:BODY] + body))


def test_damaged_header_under_a_right_checksum() -> None:
    base, new = sparse_pair(200)
    delta = encode(base, new).data
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
    delta = encode(base, new).data
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
    delta = encode(base, new).data
    start = HEADER - 8
    with pytest.raises(CorruptData, match="other weights"):
        apply(base, sealed(delta[:start] + bytes(8) + delta[HEADER:]))


def test_a_known_fingerprint_is_what_counts() -> None:
    """A claim that the base is another one is believed without reading."""
    base, new = sparse_pair()
    made = encode(base, new)
    with pytest.raises(WeightsError, match="another base"):
        decode(base, made.data, known=made.base ^ 1)


def test_other_weights_under_a_known_fingerprint() -> None:
    """A wrong `known` cannot do harm: the result's fingerprint is checked, and places stay inside."""
    base, new = sparse_pair()
    made = encode(base, new)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        other = torch.from_numpy(rng.integers(-(2**15), 2**15, len(base)).astype(np.int16)).view(torch.bfloat16)
        with pytest.raises(CorruptData):
            decode(other, made.data, known=made.base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bodies_under_a_right_checksum(dtype: torch.dtype) -> None:
    """Segments of noise, behind a table that is right up to some place."""
    rng = np.random.default_rng(3)
    base, new = sparse_pair(9000, dtype)
    delta = encode(base, new).data
    body = delta[BODY + 5 :]
    for _ in range(1500):
        kept = int(rng.integers(0, min(60, len(body))))
        content = body[:kept] + rng.bytes(int(rng.integers(0, 400)))
        try:
            change = decode(base, sealed(delta[:BODY] + struct.pack("<BI", 1, len(content)) + content))
        except CorruptData:
            continue
        assert moved(fingerprint(base), base, change) == fingerprint(new)


def test_swapped_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT_LOG2", 12)
    base, new = sparse_pair(3 * 4096)
    made = encode(base, new)
    header, body = format.opened(made.data)
    pieces = [struct.pack("<BI", kind, len(data)) + data for kind, data in format.segments(header, body)]
    for order in ([1, 0, 2], [2, 1, 0], [0, 0, 2], [0, 1], [0, 1, 2, 2]):
        swapped = b"".join(pieces[number] for number in order)
        with pytest.raises(CorruptData):
            decode(base, sealed(made.data[:BODY] + swapped))


def test_numbers_that_are_too_large() -> None:
    """Tables that would make a careless reader take a lot of memory or time."""
    base, new = sparse_pair(200)
    delta = encode(base, new).data
    for table in (
        b"\x00" + b"\xff" * 40,
        b"\x00\xff\xff\xff\xff\x7f" + bytes(20),
        b"\x00\xc7\x01\x17" + bytes(40),
        b"\x00\x05\x16\x00\x00" + b"\xff\xff\xff\xff" + bytes(40),
        b"\xff" + bytes(300),
        b"\x02\x05\x05" + bytes(40),
        b"\x00",
        b"",
    ):
        with pytest.raises(CorruptData):
            decode(base, sealed(delta[:BODY] + struct.pack("<BI", 1, len(table)) + table))
