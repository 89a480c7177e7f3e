"""What the workers of a run did when, read from RUN/timeline as it grows.

A worker's file is followed by its inode: a full one becomes WORKER.jsonl.1, of which the rest is read before the new
one. At most `MOST` spans of a worker are kept, the latest.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rillflow.storage.spans import FOLDER, STATES, Span

MOST = 200_000
_DECODER = msgspec.json.Decoder(Span)


class Lane:
    """The spans of one worker, in order, equal neighbours joined."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = 0  # the inode that was read last
        self._at = 0
        self.spans: list[Span] = []

    def follow(self) -> None:
        """Read what was written since the last call."""
        old = self._path.with_name(f"{self._path.name}.1")
        if self._file != _inode(self._path):
            if self._file in (0, _inode(old)):
                self._read(old)
            self._at = 0
            self._file = _inode(self._path)
        self._read(self._path)
        del self.spans[:-MOST]

    def _read(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            try:
                self._add(_DECODER.decode(line))
            except msgspec.MsgspecError:
                continue  # torn by a kill

    def _add(self, span: Span) -> None:
        if span.state not in STATES or span.end < span.begin:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last.state == span.state and last.end == span.begin:
            self.spans[-1] = Span(last.state, last.begin, span.end)
        elif last is None or span.begin >= last.end:
            self.spans.append(span)


class Lanes:
    """All workers of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lanes: dict[str, Lane] = {}

    def follow(self) -> dict[str, list[Span]]:
        """The spans of each worker that has any."""
        for path in sorted(self._folder.glob("*.jsonl")):
            worker = path.name.removesuffix(".jsonl")
            self._lanes.setdefault(worker, Lane(path)).follow()
        return {worker: lane.spans for worker, lane in self._lanes.items() if lane.spans}


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
