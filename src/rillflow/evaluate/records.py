"""The records of an evaluation: one JSON line with a checksum for every answer, written as the answer ends.

Invariants: a line counts whole or not at all (a sample whose line was torn by a kill is played again); of several lines
of one question and sample the first with a reward counts. A second run over the same file adds the missing samples and
changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from rillflow.errors import DataError
from rillflow.storage import disk_errors
from rillflow.types.decoding import json_decoder

_MARK = b',"check":"'
_END = b'"}\n'


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of one question. Without a reward, `cause` and `error` say why.

    `vote` is what the answer amounts to where answers are compared; `digest` is of all tokens that were sampled.
    """

    id: str
    sample: int
    seed: int
    reward: float | None = None
    cause: str = ""
    error: str = ""
    answer: str | None = None
    vote: str | None = None
    tokens: int = 0
    cut: bool = False
    calls: int = 0
    seconds: float = 0.0
    digest: str = ""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.sample)


class RecordFile:
    """The records of one benchmark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, int], Record] = {}
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab+")  # noqa: SIM115
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for line in self._file:
            record = decode(line)
            if record is None and line.endswith(b"\n"):
                raise DataError(
                    f"{self.path} has a line that was changed: {line[:60]!r}…", "give another --out, or remove the line"
                )
            if record is None:
                break
            whole += len(line)
            self._keep(record)
        self._file.truncate(whole)  # the torn end of a run that was killed

    def _keep(self, record: Record) -> None:
        known = self._known.get(record.key)
        if known is None or (known.reward is None and record.reward is not None):
            self._known[record.key] = record

    def add(self, record: Record) -> None:
        with disk_errors(self.path):
            self._file.write(encode(record))
            self._file.flush()
        self._keep(record)

    def rewarded(self, question: str, sample: int) -> bool:
        known = self._known.get((question, sample))
        return known is not None and known.reward is not None

    def of(self, wanted: Sequence[tuple[str, int]]) -> list[Record]:
        """Return the existing records of these samples."""
        return [self._known[key] for key in wanted if key in self._known]

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


def encode(record: Record) -> bytes:
    text = msgspec.json.encode(record)[:-1]
    return text + _MARK + xxh3_64_hexdigest(text).encode() + _END


def decode(line: bytes) -> Record | None:
    """The record of a line; None where it is not as it was written."""
    text, mark, end = line.rpartition(_MARK)
    if not mark or end != xxh3_64_hexdigest(text).encode() + _END:
        return None
    return json_decoder(Record).decode(text + b"}")


def fingerprint(records: Sequence[Record]) -> str:
    """One word for all that was sampled: equal for two evaluations that gave the same answers."""
    parts = sorted((one.id, one.sample, one.digest) for one in records)
    return xxh3_64_hexdigest(msgspec.json.encode(parts))
