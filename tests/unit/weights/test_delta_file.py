"""Files of deltas: their pieces come back as they were, and a damaged file is refused without reading outside of it."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
import torch

from rillflow.contracts import Change
from rillflow.errors import CorruptData, WeightsError
from rillflow.kernels.delta.format import DTYPES
from rillflow.weights import delta_file
from rillflow.weights.delta_file import Part, Piece, can_begin, changes_of, joined, piece_of
from rillflow.weights.fingerprint import fingerprint

PIECES = [
    Piece((Part("a", 0, 8),), "delta", b"eight"),
    Piece((Part("b", 16, 4), Part("c", 0, 3)), "raw", b""),
    Piece((Part("b", 20, 4),), "raw", b"and four more"),
]


def written(path: Path, given: list[Piece]) -> Path:
    path.write_bytes(b"".join(delta_file.write(given)))
    return path


def plain(given: list[Piece]) -> list[Piece]:
    return [piece._replace(data=bytes(piece.data)) for piece in given]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pieces_come_back(tmp_path: Path, count: int) -> None:
    path = written(tmp_path / "delta.rfd", PIECES[:count])
    found = delta_file.read([path])
    path.unlink()
    assert plain(found) == PIECES[:count]


def listed(*rows: list[object]) -> bytes:
    return headed(zlib.compress(msgspec.msgpack.encode(rows)))


def headed(deflated: bytes) -> bytes:
    return struct.pack("<4sI", b"RFC1", len(deflated)) + deflated


def of(first: int, weights: int, name: object = "a") -> list[object]:
    return [name, first, weights]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RFC1",
        b"RFD2" + bytes(40),
        struct.pack("<4sI", b"RFC1", 2**32 - 1),
        headed(b""),
        headed(b"not deflated"),
        headed(zlib.compress(b"\x90")[:-1]),
        headed(zlib.compress(b"\x90") + b"x"),
        headed(zlib.compress(bytes(65 << 20))),
        listed()[:-1],
        listed() + b"more",
        listed([[of(0, 8)], "delta", 5]) + b"four",
        listed([[of(0, 8)], "delta", 3]) + b"four",
        listed([[of(0, 8)], "delta", -4]),
        listed([[of(0, 8)], "delta", 8], [[of(0, 8, "b")], "delta", -4]) + b"four",
        listed([[of(-8, 8)], "delta", 4]) + b"four",
        listed([[of(0, -8)], "delta", 4]) + b"four",
        listed([[of(0, 0)], "raw", 0]),
        listed([[of(0, 8)], "xor", 4]) + b"four",
        listed([[of(0, 8)], "delta"]) + b"four",
        listed([[of(0, 8)], "delta", 4, 9]) + b"four",
        listed([[of(0, 8, 7)], "delta", 4]) + b"four",
        listed([[], "delta", 4]) + b"four",
        listed([[of(0, 8)], "raw", 2], [[of(4, 8)], "raw", 2]) + b"four",
        listed([[of(0, 8), of(0, 8)], "raw", 4]) + b"four",
        listed([[of(0, 8), of(8, 8)], "raw", 4]) + b"four",
    ],
)
def test_what_is_no_file_of_deltas_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "delta.rfd").write_bytes(data)
    with pytest.raises(CorruptData):
        delta_file.read([tmp_path / "delta.rfd"])


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = b"".join(delta_file.write(PIECES))
    chance = random.Random(3)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "d").write_bytes(data[: chance.randint(0, len(data))] if chance.random() < 0.3 else data)
        try:
            found = delta_file.read([tmp_path / "d"])
        except CorruptData:
            continue
        assert sum(len(piece.data) for piece in found) <= len(whole)


# ---------------------------------------------------------------- tensors


def applied(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    flat = tensor.clone().reshape(-1)
    if change.index_K is None:
        flat.copy_(change.value_K)
    else:
        flat[change.index_K] = change.value_K
    return flat.view(tensor.shape)


Tensors = dict[str, torch.Tensor]


def all_applied(tensors: Tensors, piece: Piece, known: dict[str, int] | None = None) -> Tensors:
    changes = changes_of(piece, tensors, known)
    return {name: applied(t, changes[name]) if name in changes else t for name, t in tensors.items()}


def part(name: str, tensor: torch.Tensor, first: int = 0) -> Part:
    return Part(name, first, tensor.numel())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


ALL = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.float64]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_parts_of_a_tensor_change_it_as_the_whole_does(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    old = (torch.randn(24, 8, generator=generator) * 9).to(dtype)
    new = torch.where(torch.rand(24, 8, generator=generator) < share, (old.float() * 1.5 + 1).to(dtype), old)
    made = piece_of((part("w", old),), old.view(-1), new.view(-1))
    assert made.piece is not None
    assert (made.fingerprint, made.changed) == (fingerprint(new), int((old != new).sum()))
    assert same(all_applied({"w": old}, made.piece)["w"], new)
    got = old
    for start, stop in ((0, 9), (9, 24)):
        made = piece_of((part("w", old[start:stop], start * 8),), old[start:stop].view(-1), new[start:stop].view(-1))
        assert made.piece is not None
        got = applied(got, changes_of(made.piece, {"w": old})["w"])
        assert made.fingerprint == fingerprint(new[start:stop].clone())
    assert same(got, new)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_a_run_changes_each_of_its_tensors(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (5, 3), "same": (20,), "b": (40, 3), "one": (), "c": (7,)}
    old = {name: (torch.randn(shape, generator=generator) * 9).to(dtype) for name, shape in shapes.items()}
    new = {
        name: torch.where(torch.rand(t.shape, generator=generator) < share, (t.float() * 1.5 + 1).to(dtype), t)
        for name, t in old.items()
    } | {"same": old["same"].clone()}
    new["b"][0, 0] = 77
    parts = tuple(part(name, tensor) for name, tensor in old.items())
    base = joined([*old.values()]).clone()  # joined tensors are valid until the next call
    made = piece_of(parts, base, joined([*new.values()]), fingerprint(base))
    assert made.piece is not None
    got = all_applied(old, made.piece, {name: fingerprint(t) for name, t in old.items()})
    assert all(same(got[name], new[name]) for name in old)
    if dtype in DTYPES and share < 1:
        assert "same" not in changes_of(made.piece, old)
        with pytest.raises(WeightsError):
            changes_of(made.piece, old | {"b": new["b"]})


def test_runs_are_of_one_dtype_and_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_file, "RUN", 10)
    sizes = {"a": 4, "b": 6, "i": 3, "c": 1, "long": 50, "none": 0, "d": 2, "e": 9}
    weights = {
        Part(name, 0, size): torch.zeros(size, dtype=torch.int64 if name == "i" else torch.bfloat16)
        for name, size in sizes.items()
    }
    names = [[part.tensor for part in run] for run in delta_file.runs(weights)]
    assert names == [["a", "b"], ["c"], ["long"], ["d"], ["e"], ["i"]]


def test_no_change_is_no_piece() -> None:
    for tensor in (torch.ones(5).bfloat16(), torch.ones(5, dtype=torch.int64), torch.tensor([2.5]).double()):
        made = piece_of((part("w", tensor),), tensor, tensor.clone())
        assert (made.piece, made.changed, made.fingerprint) == (None, 0, fingerprint(tensor))
    for dtype in (torch.float32, torch.float64):
        minus = torch.tensor([0.0, -0.0], dtype=dtype)
        assert piece_of((part("w", minus),), minus.abs(), minus).piece is not None, "bits, not values"


def test_parts_begin_at_whole_words() -> None:
    assert [can_begin(first, 2) for first in (0, 1, 2, 4, 8)] == [True, False, False, True, True]
    with pytest.raises(AssertionError):
        piece_of((Part("w", 1, 5),), torch.ones(5), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_a_piece_that_does_not_fit_is_refused(dtype: torch.dtype) -> None:
    old, new = torch.arange(16).to(dtype), torch.arange(16).to(dtype) + 1
    piece = piece_of((part("w", old),), old, new).piece
    assert piece is not None
    for odd in (old[:15], old.to(torch.int32), old.to(torch.int16)):
        with pytest.raises(CorruptData):
            changes_of(piece, {"w": odd})
    with pytest.raises(CorruptData):
        changes_of(piece, {"v": old})
    if piece.kind == "delta":
        with pytest.raises(WeightsError):
            changes_of(piece, {"w": new})
        with pytest.raises(WeightsError):
            changes_of(piece, {"w": old}, {"w": fingerprint(new)})
    other = "raw" if piece.kind == "delta" else "delta"
    wrongs = ({"kind": other}, {"parts": (Part("w", 3, 13),)}, {"parts": (Part("w", 8, 8),)}, {"data": piece.data[:-1]})
    for wrong in (*wrongs, {"parts": (Part("w", 0, 17),)}, {"parts": (Part("w", 0, 8), Part("v", 0, 8))}):
        with pytest.raises((CorruptData, WeightsError)):
            changes_of(piece._replace(**wrong), {"w": old, "v": torch.zeros(8, dtype=torch.float32)})


def test_a_damaged_delta_is_refused() -> None:
    old = torch.arange(64).bfloat16()
    piece = piece_of((part("w", old),), old, old + 1).piece
    assert piece is not None
    for at in range(len(piece.data)):
        data = bytearray(piece.data)
        data[at] ^= 1
        with pytest.raises((CorruptData, WeightsError)):
            changes_of(piece._replace(data=bytes(data)), {"w": old})
