"""A file that is being fetched: its bytes as far as they have come, and a record of which these are.

    .model.safetensors.part, .model.safetensors.part.json      beside the place it will have

Invariants: the record never names bytes that were not written, so a process that is killed and started again goes on
from it; the file gets its name only after its size and hash were found right. A power failure may keep the record and
lose bytes: the hash tells, and the file is fetched anew.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rillflow.errors import CorruptData
from rillflow.storage import disk_errors, file_hash, fsync_folder
from rillflow.types.decoding import json_decoder
from rillflow.weights.sealed import FileFacts

Span = tuple[int, int]


class Spans:
    """Half-open spans of bytes, apart from each other and in order."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:  # those that touch it become one with it
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def reach(self, start: int) -> int:
        """Up to where the bytes from `start` on are there without a gap; `start` itself where there is none."""
        found = bisect.bisect_right(self._starts, start) - 1
        return max(start, self._ends[found]) if found >= 0 else start

    def missing(self, size: int) -> list[Span]:
        """What is not there of the first `size` bytes."""
        borders = [0, *(at for span in zip(self._starts, self._ends, strict=True) for at in span), size]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    def __iter__(self) -> Iterator[Span]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        """Bytes that are there."""
        return sum(self._ends) - sum(self._starts)


class _Record(msgspec.Struct, frozen=True):
    sha256: str
    size: int
    have: list[Span]


class PartFile:
    """Writes come from threads, to places apart from each other; all else from one."""

    def __init__(self, target: Path, facts: FileFacts) -> None:
        self.target = target
        self.facts = facts
        self.path = target.with_name(f".{target.name}.part")
        self._record = target.with_name(f".{target.name}.part.json")
        with disk_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.have = self._known()
            self._at = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._at, facts.size)

    def _known(self) -> Spans:
        try:
            record = json_decoder(_Record).decode(self._record.read_bytes())
            whole = self.path.stat().st_size == record.size
        except (OSError, msgspec.MsgspecError):
            return Spans()
        same = whole and (record.sha256, record.size) == (self.facts.sha256, self.facts.size)
        valid = all(0 <= start < end <= record.size for start, end in record.have)
        return Spans(record.have) if same and valid else Spans()

    def write(self, start: int, data: bytes) -> None:
        with disk_errors(self.path):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._at, view, start)
                start, view = start + written, view[written:]

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._at, size, start)

    def note(self) -> None:
        """Write down what is there. Atomic, not durable: the hash tells at the end."""
        facts = self.facts
        record = msgspec.json.encode(_Record(sha256=facts.sha256, size=facts.size, have=list(self.have)))
        fresh = self._record.with_suffix(".tmp")
        with disk_errors(self._record):
            fresh.write_bytes(record)
            os.replace(fresh, self._record)

    def finish(self) -> Path:
        """Give the file its name; CorruptData when it is not the one that was published."""
        with disk_errors(self.target):
            os.fsync(self._at)
            if file_hash(self.path) != self.facts.sha256:
                raise CorruptData(f"what was fetched as {self.target.name} does not match its hash", "fetch it anew")
            os.replace(self.path, self.target)
            self._record.unlink(missing_ok=True)
            fsync_folder(self.target.parent)
        return self.target

    def restart(self) -> None:
        """Nothing of what is there counts any more."""
        self.have = Spans()
        self.note()

    def close(self) -> None:
        os.close(self._at)
