"""The file of a version's delta: pieces, each of which changes a run of tensors or of parts of them.

    header    "RFC1", size of the list u32, the list: msgpack, deflated (zlib); for each piece its parts, its kind and
              its size, for each part the tensor's name, its first weight and its number of weights
    pieces    one after the other, in the order of the list, to the end of the file

A part holds consecutive weights of the flat tensor and begins at a multiple of 8 bytes, so its contribution to the
tensor's fingerprint is a separate sum. A piece holds the weights of all its parts, which have one dtype, one after the
other. Small tensors are joined into runs, so that they share the tables of one delta: alone, those of a small tensor
with few changes would take more than its changes. Kind "delta" is a delta of these weights as one tensor (`format`);
"raw" is their new content.

Invariants: weights without a piece do not change; no part is empty, no two parts of a delta overlap, and no two parts
of one piece belong to the same tensor. A reader gets pieces within the file; their decoder verifies their content, and
the manifest has the hash of the whole file. `changes_of` returns what `piece_of` was given, bit for bit, or raises;
neither changes a tensor.
"""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from rillflow import kernels
from rillflow.contracts import Change
from rillflow.errors import CorruptData
from rillflow.kernels.delta.format import DTYPES, Encoded, opened
from rillflow.types.base import msgpack_decoder
from rillflow.weights import delta

_START = struct.Struct("<4sI")
_MAGIC = b"RFC1"
_LONGEST_LIST = 64 << 20
_DAMAGED = "it is damaged: pull it again, or a whole version"

Kind = Literal["delta", "raw"]


class Part(NamedTuple):
    tensor: str
    first: int
    weights: int


class Piece(NamedTuple):
    parts: tuple[Part, ...]
    kind: Kind
    data: bytes | memoryview

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts)


class Located(NamedTuple):
    """The place of a piece in a file."""

    parts: tuple[Part, ...]
    kind: Kind
    path: Path
    begin: int
    size: int


class _Listed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    parts: tuple[Part, ...]
    kind: Kind
    size: int


def write(pieces: Sequence[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file."""
    listed = zlib.compress(
        msgspec.msgpack.encode([_Listed(piece.parts, piece.kind, len(piece.data)) for piece in pieces]), 9
    )
    yield _START.pack(_MAGIC, len(listed)) + listed
    for piece in pieces:
        yield piece.data


def read(paths: Iterable[Path]) -> list[Piece]:
    """Return the pieces of all files of a delta. Their data are views, which stay valid if the files are removed."""
    pieces = [
        Piece(one.parts, one.kind, content[one.begin : one.begin + one.size])
        for content, found in map(_opened, paths)
        for one in found
    ]
    _check_parts(pieces)
    return pieces


def locate(paths: Iterable[Path]) -> list[Located]:
    """Return the places of the pieces in all files of a delta, without their data."""
    found = [one for path in paths for one in _opened(path)[1]]
    _check_parts(found)
    return found


def _check_parts(pieces: Sequence[Piece | Located]) -> None:
    ends: dict[str, int] = {}
    for part in sorted(part for piece in pieces for part in piece.parts):
        if part.first < ends.get(part.tensor, 0):
            raise CorruptData(f"a delta changes weights of {part.tensor} twice", _DAMAGED)
        ends[part.tensor] = part.first + part.weights


def _opened(path: Path) -> tuple[memoryview, list[Located]]:
    """Return a file's content, mapped, and its pieces."""
    try:
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CorruptData(f"{path} cannot be read: {error}", _DAMAGED) from error
    listed, at = _list(content, path)
    begins = accumulate((one.size for one in listed), initial=at)
    found = [Located(one.parts, one.kind, path, begin, one.size) for one, begin in zip(listed, begins, strict=False)]
    return content, found


def _list(content: memoryview, path: Path) -> tuple[list[_Listed], int]:
    """Return the file's list of pieces, which must cover the file, and the place of the first piece."""
    if len(content) < _START.size or content[: len(_MAGIC)] != _MAGIC:
        raise CorruptData(f"{path} is not a file of deltas", _DAMAGED)
    start = _START.size + _START.unpack_from(content)[1]
    if start > len(content):
        raise CorruptData(f"{path} is cut", _DAMAGED)
    try:
        deflated = zlib.decompressobj()
        text = deflated.decompress(content[_START.size : start], _LONGEST_LIST)
        listed = msgpack_decoder(list[_Listed]).decode(text)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} has no valid list of pieces: {error}", _DAMAGED) from error
    if not deflated.eof or deflated.unused_data:
        raise CorruptData(f"{path} has a list of pieces that does not end where it should", _DAMAGED)
    if any(one.size < 0 for one in listed) or any(p.first < 0 or p.weights < 1 for one in listed for p in one.parts):
        raise CorruptData(f"{path} has pieces or parts of an impossible size", _DAMAGED)
    if any(len({part.tensor for part in one.parts}) < len(one.parts) for one in listed):
        raise CorruptData(f"{path} has several parts of a tensor in one piece", _DAMAGED)
    if not all(one.parts for one in listed) or start + sum(one.size for one in listed) != len(content):
        raise CorruptData(f"{path} has {len(content) - start} bytes of pieces, other than its list says", _DAMAGED)
    return listed, start


# ---------------------------------------------------------------- from tensors to pieces and back


WORD = 8
RUN = 1 << 22  # weights; a tensor that has more is a run of its own

_kept = threading.local()


class Made(NamedTuple):
    """`fingerprint` is that of the new weights as if they were a tensor; `piece` is None where no bit has changed."""

    piece: Piece | None
    fingerprint: int
    changed: int


def can_begin(first: int, itemsize: int) -> bool:
    """Return whether a part may begin at this weight."""
    return first * itemsize % WORD == 0


def runs(weights: Mapping[Part, torch.Tensor]) -> list[tuple[Part, ...]]:
    """Return the parts of each piece: those of one dtype in their order, up to a number of weights. Empty parts are
    left out."""
    found: dict[torch.dtype, list[list[Part]]] = {}
    for part, tensor in weights.items():
        of_dtype = found.setdefault(tensor.dtype, [[]])
        if part.weights and sum(known.weights for known in of_dtype[-1]) + part.weights > RUN:
            of_dtype.append([])
        if part.weights:
            of_dtype[-1].append(part)
    return [tuple(run) for of_dtype in found.values() for run in of_dtype if run]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All weights of a run, flat: of one tensor itself, of several a copy; on the host it is good until this thread's
    next one."""
    flat = [_flat(tensor) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat, out=None if flat[0].is_cuda else _room(flat[0], sum(map(len, flat))))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Without an operation where there is nothing to do: each of torch's lets go of the interpreter, and a thread
    beside a busy event loop waits every time to have it back."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)


def _room(like: torch.Tensor, weights: int) -> torch.Tensor:
    """Memory that is kept: to get new memory from the system takes several times as long as to fill it."""
    rooms: dict[str, torch.Tensor] = _kept.__dict__
    key = f"{like.dtype} {like.device}"
    if key not in rooms or len(rooms[key]) < weights:
        rooms[key] = torch.empty(max(weights, min(RUN, 2 * weights)), dtype=like.dtype, device=like.device)
    return rooms[key][:weights]


def piece_of(parts: tuple[Part, ...], base: torch.Tensor, new: torch.Tensor, known: int | None = None) -> Made:
    """What turns the weights of these parts, joined, from `base` into `new`. `known` is the fingerprint of `base`."""
    assert all(can_begin(part.first, base.element_size()) for part in parts), "parts begin at whole words"
    if base.dtype not in DTYPES:
        return _raw_piece(parts, base, new)
    return made_of(parts, delta.encode(base, new, known))


def pieces_on_device(
    runs: Sequence[tuple[Part, ...]], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[int | None]
) -> list[Made]:
    """`piece_of` of runs on one GPU, of dtypes that deltas have: all go through the same few launches."""
    if not kernels.enabled("delta_gpu"):
        return [piece_of(parts, *pair, one) for parts, pair, one in zip(runs, pairs, known, strict=True)]
    from rillflow.kernels.delta import gpu

    sums = [value for value in known if value is not None]
    encoded = gpu.encode_many(pairs, sums if len(sums) == len(known) else None)
    return [made_of(parts, one) for parts, one in zip(runs, encoded, strict=True)]


def made_of(parts: tuple[Part, ...], encoded: Encoded) -> Made:
    """Return the piece of an encoded run; none if nothing has changed."""
    piece = Piece(parts, "delta", encoded.data) if encoded.changed else None
    return Made(piece, encoded.result, encoded.changed)


def changes_of(
    piece: Piece, tensors: Mapping[str, torch.Tensor], known: Mapping[str, int] | None = None
) -> dict[str, Change]:
    """What the piece changes of each of these tensors, which are whole and on the host. Who gives their fingerprints as
    `known` must compare what they become: then a run of several tensors is not looked through for being the right ones.

    CorruptData for a damaged piece or one that does not fit, WeightsError for one of other weights than these.
    """
    parts = [_part(tensors, part, piece.kind) for part in piece.parts]
    if len({part.dtype for part in parts}) > 1:
        raise CorruptData("a piece of a delta is of several dtypes", "it is damaged")
    base = joined(parts)
    if piece.kind == "raw":
        return dict(_split(piece, _raw_change(piece, base), tensors))
    return dict(_split(piece, delta.decode(base, piece.data, _known(piece, tensors, known)), tensors))


def _known(piece: Piece, tensors: Mapping[str, torch.Tensor], known: Mapping[str, int] | None) -> int | None:
    if known is None:
        return None
    name = piece.parts[0].tensor
    alone = piece.parts == (Part(name, 0, tensors[name].numel()),)
    return known[name] if alone else opened(piece.data)[0].base


def _part(tensors: Mapping[str, torch.Tensor], part: Part, kind: Kind) -> torch.Tensor:
    tensor = tensors.get(part.tensor)
    if tensor is None:
        raise CorruptData(f"a delta changes {part.tensor}, which is not there", "it is of another model")
    end = part.first + part.weights
    if end > tensor.numel() or not can_begin(part.first, tensor.element_size()) or kind != _kind(tensor):
        raise CorruptData(f"a delta of {part.tensor} does not fit its {tensor.numel()} weights", "it is damaged")
    flat = _flat(tensor)
    return flat if part.weights == tensor.numel() else flat[part.first : end]


def _split(piece: Piece, change: Change, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Change]]:
    """The change of joined weights, as changes of the tensors that have any."""
    index_K, value_K = change
    ends = list(accumulate(part.weights for part in piece.parts))
    borders = [0, *(ends if index_K is None else torch.searchsorted(index_K, torch.tensor(ends)).tolist())]
    place_K = None if index_K is None else index_K.numpy()
    for part, end, low, high in zip(piece.parts, ends, borders, borders[1:], strict=False):
        if place_K is not None and low < high:
            places = place_K[low:high] - (end - part.weights - part.first)
            yield part.tensor, Change(torch.from_numpy(places), value_K[low:high])
        elif place_K is None and part.weights == tensors[part.tensor].numel():
            yield part.tensor, Change(None, value_K[low:high])
        elif place_K is None:
            yield part.tensor, Change(torch.arange(part.first, part.first + part.weights), value_K[low:high])


def _kind(tensor: torch.Tensor) -> Kind:
    return "delta" if tensor.dtype in DTYPES else "raw"


def _raw_piece(parts: tuple[Part, ...], base: torch.Tensor, new: torch.Tensor) -> Made:
    from rillflow.weights.fingerprint import fingerprint

    if torch.equal(base.view(torch.uint8), new.view(torch.uint8)):
        return Made(None, fingerprint(new), 0)
    data = new.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return Made(Piece(parts, "raw", data), fingerprint(new), int((base != new).count_nonzero()))


def _raw_change(piece: Piece, base: torch.Tensor) -> Change:
    if len(piece.data) != base.nbytes:
        raise CorruptData(f"a raw piece has {len(piece.data)} bytes for {base.nbytes}", "it is damaged")
    return Change(None, torch.frombuffer(bytearray(piece.data), dtype=base.dtype))
