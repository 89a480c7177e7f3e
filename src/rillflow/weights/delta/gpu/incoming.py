"""The bytes of a batch of segments on their way to the device, and their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
import xxhash

from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Spans
from rillflow.weights.delta.gpu.memory import copy_bytes, digest_function, digest_of
from rillflow.weights.delta.gpu.room import Piece, Room
from rillflow.weights.delta.gpu.threads import divided, shared
from rillflow.weights.delta.jit import compiled

_CHECKSUM, _SEALED = heads.CHECKSUM, heads.SEALED


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """What copies to the device while its kernels run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Incoming:
    """Bytes that other threads copy to memory which the device can read, and the device then to its own.

    Of a tensor that is in this batch alone, that is the whole delta without its checksum, which is computed from what
    was copied. Of others it is from their first segment here to the last that has bytes.

    `data` are whole words, and three more than there are; `heads` say where each segment's bytes begin in them and how
    many there are. The memory on the device is there at once, so that the copy need not wait for kernels that are
    launched in between.
    """

    def __init__(
        self, deltas: heads.Deltas, checksums: heads.Checksums, some: Spans, begin: Array, size: Array,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._deltas, self._checksums, self._device = deltas, checksums, device
        number = len(some)
        (self._tensor, self._from), self._to = np.empty((2, number), np.int64), np.empty(number + 1, np.int64)
        self._whole, moved = np.empty(number, np.bool), np.empty((number, 2), np.int64)
        runs = _lay_out(
            some.tensor, some.start, begin, size, deltas.address, deltas.length, self._tensor, self._from, self._to,
            self._whole, moved,
        )  # fmt: skip
        self._tensor, self._from, self._whole = self._tensor[:runs], self._from[:runs], self._whole[:runs]
        self._to, total = self._to[: runs + 1], int(self._to[runs])
        self._host, self._room = Room(device, host=True), Room(device)
        heads_here, self._here = self._host.longs(2 * number), self._host.ints(total // 4 + 4)
        self.heads, self.data = self._room.longs(2 * number), self._room.ints(total // 4 + 4)
        self._host.make()
        heads_here.array[:] = moved.reshape(-1)
        self._here.array[-4:] = 0
        if device.type == "cuda":
            # Whatever used this memory before is done when this event is.
            self._room.make()
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.record()
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self.heads, self.data = heads_here, self._here
        self._under_way = divided(self._copy, total)

    def _copy(self, first: int, beyond: int) -> None:
        _copy_bytes(self._here.address, first, beyond, self._from, self._to, self._whole)

    def _compute(self, first: int, beyond: int) -> None:
        """The checksums of these runs, of those that are whole."""
        found, digest = self._checksums.found, digest_function()
        if digest:
            _digests(self._here.address, first, beyond, self._to, self._whole, self._tensor, digest, found)
            return
        for run in range(first, beyond):
            if self._whole[run]:
                data = self.bytes_here[self._to[run] : self._to[run + 1]]
                found[self._tensor[run]] = xxhash.xxh3_64_intdigest(data.data)

    @property
    def bytes_here(self) -> Array:
        return self._here.array.view(np.uint8)

    def wait(self) -> None:
        """Until everything has been copied here."""
        for share in self._under_way:
            share.result()

    def check(self) -> None:
        """Let others compute the checksums of what was copied."""
        self._checksums.take(self._tensor[self._whole], shared(self._compute, self._to))

    @contextmanager
    def sent(self, after: Sequence[torch.cuda.Event]) -> Iterator[None]:
        """Let the device copy what is here, beside what it does meanwhile. What is launched within comes behind that
        and the events, and before what is launched after `arrived`."""
        if self._device.type != "cuda":
            yield
            return
        side, size = _side(self._device), self._host.size
        for event in (self._free, *after):
            side.wait_event(event)
        with torch.cuda.stream(side):
            self._room.memory[:size].copy_(self._host.memory[:size], non_blocking=True)
            yield
            self._sent.record(side)

    def arrived(self) -> Piece:
        """The data, for what is launched from now on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._sent)
        return self.data


@compiled
def _lay_out(
    tensor: Array, start: Array, begin: Array, size: Array, address: Array, length: Array, number: Array,
    source: Array, to: Array, whole: Array, moved: Array,
) -> int:  # fmt: skip
    """Of each run of segments of one tensor, its number, the address of its bytes, where they go, and whether they are
    all that its delta has; of each segment, where its bytes go and how many it has. How many runs there are."""
    run, s = 0, 0
    to[0] = 0
    while s < len(tensor):
        first, t, last = s, tensor[s], begin[s]
        while s < len(tensor) and tensor[s] == t:
            last = begin[s] + size[s] if size[s] else last
            s += 1
        before = begin[first]
        whole[run] = start[first] == 0 and begin[s - 1] + size[s - 1] == length[t]
        number[run], source[run] = t, address[t] + (0 if whole[run] else before)
        to[run + 1] = to[run] + (length[t] - _CHECKSUM if whole[run] else last - before)
        for k in range(first, s):
            moved[k, 1] = size[k]
            moved[k, 0] = begin[k] + to[run] - (_CHECKSUM if whole[run] else before)
        run += 1
    return run


@compiled
def _copy_bytes(buffer: int, first: int, beyond: int, source: Array, to: Array, whole: Array) -> None:
    """So many of the bytes of all runs, which may begin and end within one. Of whole ones the checksum is left out."""
    run = np.searchsorted(to, first, side="right") - 1
    while first < beyond:
        here, end = first - to[run], min(beyond, to[run + 1])
        if whole[run] and here < _SEALED:
            end = min(end, to[run] + _SEALED)
        skipped = _CHECKSUM if whole[run] and here >= _SEALED else 0
        copy_bytes(buffer + first, source[run] + here + skipped, end - first)
        first = end
        while run + 1 < len(to) and to[run + 1] <= first:
            run += 1


@compiled
def _digests(
    buffer: int, first: int, beyond: int, to: Array, whole: Array, number: Array, digest: int, found: Array
) -> None:
    for run in range(first, beyond):
        if whole[run]:
            found[number[run]] = digest_of(digest, buffer + to[run], to[run + 1] - to[run])
