"""The bytes of a batch of segments on their way to the device, and their checksums."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import xxhash

from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Spans, Waiting
from rillflow.weights.delta.gpu.memory import copy_bytes, digest_function, digest_of
from rillflow.weights.delta.gpu.plans import Batch, Plans
from rillflow.weights.delta.gpu.room import Piece, Room
from rillflow.weights.delta.gpu.threads import divided, shared
from rillflow.weights.delta.jit import compiled

_CHECKSUM, _SEALED = heads.CHECKSUM, heads.SEALED


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """What copies to the device while its kernels run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Incoming:
    """Bytes that other threads copy to memory which the device can read, and the device then to its own; and what the
    tables in them say.

    Of a tensor that is in this batch alone, that is the whole delta without its checksum, which is computed from what
    was copied. Of others it is from their first segment here to the last that has bytes.

    `data` are whole words, and one more than there are; `begin` is where each segment's bytes begin in them. The memory
    on the device is there at once, so that copies need not wait for kernels that are launched in between.
    """

    def __init__(
        self, deltas: heads.Deltas, checksums: heads.Checksums, some: Spans, begin: Array, size: Array, last: Array,
        classes: int, width: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._deltas, self._checksums, self._device = deltas, checksums, device
        number, (self._tensor, self._from) = len(some), np.empty((2, len(some)), np.int64)
        self._to, self.begin, self._whole = np.empty(number + 1, np.int64), np.empty_like(begin), np.empty(number, bool)
        runs = _lay_out(
            some.tensor, some.start, begin, size, deltas.address, deltas.length, self._tensor, self._from, self._to,
            self._whole, self.begin,
        )  # fmt: skip
        self._tensor, self._from, self._whole = self._tensor[:runs], self._from[:runs], self._whole[:runs]
        self._to, self.total = self._to[: runs + 1], int(self._to[runs])
        batch = Batch(self.begin, size, last, classes, int(some.weights.sum()), width)
        host, room = Room(device, host=True), Room(device)
        here, there = ((one.ints(self.total // 4 + 2), one.bytes(batch.room())) for one in (host, room))
        host.make()
        if device.type == "cuda":
            # Whatever used this memory before is done when this event is.
            room.make()
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.record()
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            there = here
        self._here, self._there = here[0], there[0]
        self._plans = Plans(here[1], there[1], batch)
        self.data: Array = self._here.array.view(np.uint8)
        self.data[-8:] = 0
        self._under_way = divided(self._copy, self.total)

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
                data = self.data[self._to[run] : self._to[run + 1]]
                found[self._tensor[run]] = xxhash.xxh3_64_intdigest(data.data)

    def read(self, landing: Waiting) -> Plans | None:
        """What the tables say, None when they are none, given the sizes of groups, which are waited for. Then data and
        plans are on their way to the device, and the checksums are being computed."""
        (sizes,) = landing.wait()
        for share in self._under_way:
            share.result()
        self._checksums.take(self._tensor[self._whole], shared(self._compute, self._to))
        if self._device.type != "cuda":
            return self._plans if self._plans.read(self.data, sizes) else None
        side = _side(self._device)
        with torch.cuda.stream(side):
            side.wait_event(self._free)
            self._there.tensor.copy_(self._here.tensor, non_blocking=True)
            if not self._plans.read(self.data, sizes):
                return None
            self._plans.send()
            self._sent.record(side)
        return self._plans

    def arrived(self) -> Piece:
        """The words on the device, for kernels that are launched from now on, as are the plans."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._sent)
        return self._there


@compiled
def _lay_out(
    tensor: Array, start: Array, begin: Array, size: Array, address: Array, length: Array, number: Array,
    source: Array, to: Array, whole: Array, moved: Array,
) -> int:  # fmt: skip
    """Of each run of segments of one tensor, its number, the address of its bytes, where they go, and whether they are
    all that its delta has; of each segment, where its bytes go. How many runs there are."""
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
            moved[k] = begin[k] + to[run] - (_CHECKSUM if whole[run] else before)
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
