"""Deltas of tensors: encode, decode, apply. `kernels.delta.format` documents the bytes.

Tensors on a GPU are encoded there, by `kernels.delta.gpu`; those on the host by `kernels.delta`, several segments at
once, in as many threads as torch uses. Servers' workers alone decode deltas on a GPU. `Ahead` compiles the codec before
its first use: that takes half a minute, or a second where the machine code was kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from rillflow import kernels
from rillflow.contracts import Change
from rillflow.errors import CorruptData, WeightsError
from rillflow.kernels import delta as codec
from rillflow.kernels.delta import format
from rillflow.kernels.delta.format import CODED, DAMAGED, DENSE, RAW, SAME, Array, Buffer, Encoded, Header, Layout
from rillflow.weights.fingerprint import bits_of, fingerprint

# Each changed weight takes some dozen bytes while its segment is coded; each segment has a table of its own.
SEGMENT_LOG2, _DENSE_LOG2 = 22, 20
_MODULUS = 1 << 64

T = TypeVar("T")
R = TypeVar("R")


def encode(base: torch.Tensor, new: torch.Tensor, known: int | None = None) -> Encoded:
    """The delta that makes `new` of `base`; both have the same dtype and shape. `known` is the fingerprint of `base`,
    where the caller has it: it is not computed again, and not checked."""
    format.layout_of_pair(base, new)
    if base.is_cuda and kernels.enabled("delta_gpu"):
        from rillflow.kernels.delta import gpu

        return gpu.encode_gpu(base, new, known)
    return encode_slices(bits_of(base.cpu()).__getitem__, new.cpu(), fingerprint(base) if known is None else known)


def encode_slices(old: Callable[[slice], Array], new: torch.Tensor, known: int) -> Encoded:
    """The same for weights on the host with a base of which only slices are in memory at once: `old` returns the bits
    of one, and `known` is the fingerprint of all."""
    new_N, layout = bits_of(new), format.layout_of(new)
    log2 = _segment_log2(old, new_N)
    made = list(_at_once(lambda run: _encode(old(run), new_N[run], run.start, layout), runs_of(len(new_N), log2)))
    result = (known + sum(segment.gained for segment in made)) % _MODULUS
    header = Header(layout.code, log2, len(new_N), known, result)
    data = format.sealed(header, (piece for segment in made for piece in segment.pieces))
    return Encoded(data, known, result, sum(segment.changed for segment in made))


def decode(base: torch.Tensor, data: Buffer, known: int | None = None) -> Change:
    """Return the verified change of the delta; `base` stays as it is. `known` is its fingerprint, if the caller
    has it. CorruptData for a damaged delta, WeightsError for one of another base.

    If more than an eighth of the weights change, the change has all of them.
    """
    layout = format.layout_of(base)
    if base.is_cuda:
        raise WeightsError("a delta is decoded here onto weights on the host", "move them there first")
    header, body = format.opened(data)
    old_N = bits_of(base)
    header.check_base(layout, len(old_N), fingerprint(base) if known is None else known)
    parts = zip(runs_of(len(old_N), header.segment_log2), format.segments(header, body), strict=True)
    found = _Found(old_N)
    for run, (index_K, value_K, gained) in _at_once(lambda part: (part[0], _decode(old_N, *part, layout)), parts):
        found.add(run.start, index_K, value_K, gained)
    header.check_result((header.base + found.gained) % _MODULUS)
    return found.change(base.dtype)


def apply(base: torch.Tensor, data: Buffer, known: int | None = None) -> torch.Tensor:
    """A new tensor, of the shape and on the device of `base`. Raises CorruptData or WeightsError if it cannot be
    made."""
    change = decode(base, data, known)
    if change.index_K is None:
        return change.value_K.reshape(base.shape)
    return _changed(base.detach().clone(memory_format=torch.contiguous_format), change)


def apply_(base: torch.Tensor, data: Buffer, known: int | None = None) -> torch.Tensor:
    """The same in place: `base` is written only after everything has been verified."""
    with torch.no_grad():
        return _changed(base, decode(base, data, known))


def _changed(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """`tensor`, after the change."""
    if change.index_K is None:
        tensor.copy_(change.value_K.reshape(tensor.shape))
    elif tensor.is_contiguous():
        bits_of(tensor)[change.index_K.numpy()] = bits_of(change.value_K)
    else:
        tensor[torch.unravel_index(change.index_K, tensor.shape)] = change.value_K
    return tensor


def _at_once(work: Callable[[T], R], parts: Iterable[T]) -> Iterator[R]:
    """The results in order, by waves of as many as there are threads, so that few of them wait in memory."""
    threads, left = torch.get_num_threads(), iter(parts)
    first = list(islice(left, 2))
    if threads == 1 or len(first) < 2:
        yield from map(work, (*first, *left))
        return
    with ThreadPoolExecutor(threads) as pool:
        wave = [*first, *islice(left, threads - 2)]
        while wave:
            yield from list(pool.map(work, wave))
            wave = list(islice(left, threads))


# ------------------------------------------------------------ one segment


class _Segment(NamedTuple):
    pieces: list[bytes]
    gained: int
    changed: int


def _segment_log2(old: Callable[[slice], Array], new_N: Array) -> int:
    """By a sample: the first few of every 4096 weights."""
    changed = size = 0
    for run in runs_of(len(new_N) // 4096 * 4096 or len(new_N), SEGMENT_LOG2):
        pair = (_sample(bits_N) for bits_N in (old(run), new_N[run]))
        differ = np.not_equal(*pair)
        changed, size = changed + int(np.count_nonzero(differ)), size + differ.size
    return _DENSE_LOG2 if changed > DENSE * size else SEGMENT_LOG2


def _sample(bits_N: Array) -> Array:
    return bits_N.reshape(-1, 4096)[:, :64] if len(bits_N) >= 4096 else bits_N


def runs_of(weights: int, log2: int) -> Iterator[slice]:
    """Yield slices of at most `1 << log2` weights, up to `weights`."""
    return (slice(start, min(start + (1 << log2), weights)) for start in range(0, weights, 1 << log2))


def _encode(old_N: Array, new_N: Array, start: int, layout: Layout) -> _Segment:
    changed, gained, pieces = codec.encode(old_N, new_N, layout, start * layout.width // 64)
    kind = CODED if pieces else RAW if changed else SAME
    if kind == RAW:
        pieces = (new_N.tobytes(),)
    return _Segment([format.segment_head(kind, sum(map(len, pieces))), *pieces], gained, changed)


def _decode(old_N: Array, run: slice, segment: tuple[int, memoryview], layout: Layout) -> tuple[Array, Array, int]:
    """Return the places of changed weights of a run, from its start, their values, and the fingerprint's change."""
    (kind, data), old_N = segment, old_N[run]
    first_word = run.start * layout.width // 64
    if kind == CODED:
        return codec.decode(old_N, data, layout, first_word)
    if kind == SAME:
        return np.empty(0, np.int32), np.empty(0, old_N.dtype), 0
    if len(data) != old_N.nbytes:
        raise CorruptData(f"a delta has {len(data)} bytes for {len(old_N)} weights", DAMAGED)
    new_N = np.frombuffer(data, old_N.dtype)
    index_K = np.flatnonzero(new_N != old_N).astype(np.int32)
    value_K = new_N[index_K]
    return index_K, value_K, codec.difference(old_N, index_K, value_K, first_word)


class _Found:
    """Changes of all segments: places and values, or a changed copy as soon as they are more than an eighth."""

    def __init__(self, old_N: Array) -> None:
        self._old_N = old_N
        self._pieces: list[tuple[int, Array, Array]] = []
        self._count = 0
        self._new_N: Array | None = None
        self.gained = 0

    def add(self, start: int, index_K: Array, value_K: Array, gained: int) -> None:
        self.gained += gained
        self._count += len(index_K)
        self._pieces.append((start, index_K, value_K))
        if self._count > DENSE * len(self._old_N):
            self._new_N = self._old_N.copy() if self._new_N is None else self._new_N
            for first, places, values in self._pieces:
                self._new_N[first:][places] = values
            self._pieces = []

    def change(self, dtype: torch.dtype) -> Change:
        if self._new_N is not None:
            return Change(None, _tensor(self._new_N, dtype))
        index_K, value_K = np.empty(self._count, np.int64), np.empty(self._count, self._old_N.dtype)
        end = 0
        for start, places, values in self._pieces:
            begin, end = end, end + len(places)
            np.add(places, start, out=index_K[begin:end])
            value_K[begin:end] = values
        return Change(torch.from_numpy(index_K), _tensor(value_K, dtype))


def _tensor(bits_K: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits_K.view(f"i{dtype.itemsize}")).view(dtype)


# ---------------------------------------------------------------- compiling ahead


log = logging.getLogger(__name__)


class Ahead:
    """Prepares the encoder for weights of a dtype on a device, in a thread of its own; for one who `reads` them, on the
    host, the decoder as well. The process waits for the thread at its end, because a
    daemon thread inside torch would abort it."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, reads: bool = False) -> None:
        self._thread = threading.Thread(target=_prepare, args=(dtype, device, reads), name="deltas")
        self._thread.start()

    def ready(self) -> bool:
        """Return whether it has ended. If it has failed, the next encoding raises its error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """The same, after so long at most."""
        self._thread.join(seconds)
        return self.ready()


def _prepare(dtype: torch.dtype, device: torch.device, reads: bool) -> None:
    try:
        base = torch.ones(4096, dtype=dtype, device=device)
        new = base.clone()
        new[::64] += 1
        new[1::64] *= -3
        with kernels.one_compiles():
            _use(base, new, reads)
    except Exception:
        log.warning("the codec of deltas could not be prepared", exc_info=True)


def _use(base: torch.Tensor, new: torch.Tensor, reads: bool) -> None:
    from rillflow.kernels.delta import union
    from rillflow.weights.fingerprint import moved

    made = encode(base, new)
    if reads:
        change = decode(base, made.data)
        moved(made.base, base, change)
        assert change.index_K is not None, "few weights have changed"
        union(change.index_K.numpy(), change.index_K.numpy())
