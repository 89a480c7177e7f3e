"""Moves databuffers between stages that hold the data on different numbers of ranks.

A stage of k ranks holds its rows on k evenly spread ranks (`holders`), so from k to 2 k ranks every holder keeps half
of its rows; the other ranks have the same columns without rows. The global order is that of the ranks, and within a
rank that of its rows.

Invariants: the global order stays; rows move with all of their columns, bit for bit; every rank of the new stage gets a
run of rows with about the same number of tokens; a row is sent only to the rank that gets it; between stages of equal
size nothing moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rillflow.errors import GraphError
from rillflow.trainer.batches import Databuffer, concatenated, from_columns
from rillflow.trainer.parallel import Peers

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Ints

    Columns = dict[str, npt.NDArray[Any]]


class _Column(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    data: bytes


# Built at import: msgspec crashes if several threads decode a type for the first time.
_COLUMNS = msgspec.msgpack.Decoder(list[_Column])


class Redistribution:
    """Moves data, and counts the bytes that this rank has sent to others and received from them."""

    def __init__(self, peers: Peers) -> None:
        self.sent = 0
        self.received = 0
        self._peers = peers

    def move(self, data: Databuffer, now: int, to: int) -> Databuffer:
        """Return this rank's rows in a stage of `to` ranks; `data` are its rows in the stage of `now`. Collective."""
        if now == to:
            return data
        self._check(data, now, to)
        owner_R = self._owners(data.rows.length_R, to)
        messages = [_packed(data, np.flatnonzero(owner_R == rank)) for rank in range(self._peers.size)]
        answers = self._peers.exchange(messages)
        self.sent += sum(len(message) for rank, message in enumerate(messages) if rank != self._peers.rank)
        self.received += sum(len(message) for rank, message in enumerate(answers) if rank != self._peers.rank)
        return _joined([_unpacked(message) for message in answers if message], data)

    def _check(self, data: Databuffer, now: int, to: int) -> None:
        if not (1 <= now <= self._peers.size and 1 <= to <= self._peers.size):
            raise GraphError(f"data cannot move from {now} to {to} ranks", f"the trainer has {self._peers.size} ranks")
        if len(data) and self._peers.rank not in (own := holders(now, self._peers.size)):
            raise GraphError(f"rank {self._peers.rank} holds rows in a stage of {now} ranks", f"these do: {own}")

    def _owners(self, length_R: Ints, to: int) -> Ints:
        """Return the rank that gets each row, by the place of the row's middle among all tokens. So a rank needs to
        know only the others' numbers of tokens. Rows without tokens count as one."""
        weight_R = np.maximum(length_R, 1)
        tokens = self._peers.everyone(msgspec.msgpack.encode(int(weight_R.sum())))
        of_rank = [msgspec.msgpack.decode(message, type=int) for message in tokens]
        before, whole = sum(of_rank[: self._peers.rank]), max(sum(of_rank), 1)
        twice_middle_R = 2 * (before + np.cumsum(weight_R)) - weight_R
        owner_R: Ints = np.array(holders(to, self._peers.size))[twice_middle_R * to // (2 * whole)]
        return owner_R


def holders(stage: int, ranks: int) -> list[int]:
    """Return the ranks that hold the rows of a stage of `stage` ranks."""
    return [place * ranks // stage for place in range(stage)]


def _packed(data: Databuffer, index_R: Ints) -> bytes:
    if not len(index_R):
        return b""
    rows = data if len(index_R) == len(data) else data.taking(index_R)
    columns = {name: np.ascontiguousarray(rows[name]) for name in rows.names}
    if any(column.dtype.hasobject for column in columns.values()):
        raise GraphError("a column holds Python objects", "columns that move between ranks hold numbers or strings")
    return msgspec.msgpack.encode([_Column(name, c.dtype.str, c.tobytes()) for name, c in columns.items()])


def _unpacked(message: bytes) -> Columns:
    columns = _COLUMNS.decode(message)
    return {column.name: np.frombuffer(column.data, np.dtype(column.dtype)) for column in columns}


def _joined(pieces: list[Columns], before: Databuffer) -> Databuffer:
    """Join the pieces in the order of their ranks; without any, return the former columns, empty."""
    if not pieces:
        return before.taking(np.empty(0, np.int64))
    if any(piece.keys() != pieces[0].keys() for piece in pieces):
        raise GraphError(
            "ranks hold different columns", "nodes must make the same columns on every rank, even empty ones"
        )
    # A single piece is copied too: received bytes are read-only.
    return from_columns({name: concatenated(name, [piece[name] for piece in pieces]) for name in pieces[0]})
