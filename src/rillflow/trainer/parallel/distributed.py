"""`Peers` over torch.distributed: messages by gloo, tensors by gloo or NCCL.

Every collective begins with a meeting: each rank sends one frame of a fixed size that says at which collective it is
and whether it has failed. So a rank that gives a step up takes the others with it wherever they are, and ranks that
have lost each other get an error that says who is where instead of a mixture of two collectives. Small messages travel
in the frame itself. Every wait ends at the deadline of its process group; a dead peer ends it at once.

Messages are bytes: nothing here (un)pickles. What is not protected: whoever can reach the ports of the ranks can join
them, so they listen on the interface of the rendezvous only, which is loopback unless somebody chose another.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np
import torch

from rillflow.errors import ErrorBody, RillflowError, RunError, to_body
from rillflow.trainer.parallel.peers import GivenUp, PeerLost, Stopped

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch._C._distributed_c10d import ProcessGroup

_FRAME = 1024
_HEAD = struct.Struct("<BBq")  # failed, which collective, bytes of the message
_ROOM = _FRAME - _HEAD.size
_LONGEST = 240  # characters of an error's message and of its hint: they must fit into a frame
_PLACE = re.compile(r"^\[\S+\.\w+:\d+\] ")  # in the backend's own source
_KINDS = ("total", "highest", "first", "everyone", "exchange", "add", "agree")
# Built here: msgspec crashes where several threads decode a type for the first time.
_ERROR = msgspec.msgpack.Decoder(ErrorBody)
_BUCKET = 64 << 20  # bytes of small tensors that are added at once


class Distributed:
    """For one thread. `tensors` is the group that adds tensors, where it is another than that of the messages."""

    def __init__(self, rank: int, size: int, messages: ProcessGroup, tensors: ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._messages = messages
        self._tensors = messages if tensors is None else tensors

    # ------------------------------------------------------------ messages

    def total(self, values: Sequence[float]) -> list[float]:
        return self._folded("total", np.add, values)

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._folded("highest", np.maximum, values)

    def _folded(self, kind: str, fold: Callable[..., npt.NDArray[np.float64]], values: Sequence[float]) -> list[float]:
        said = [np.frombuffer(row, np.float64) for row in self._meet(kind, np.asarray(values, np.float64).tobytes())]
        if len({len(row) for row in said}) > 1:
            raise _out_of_step(f"they have {[len(row) for row in said]} values for `{kind}`")
        folded: list[float] = reduce(fold, said).tolist()  # in the order of ranks: the same bits everywhere
        return folded

    def first(self, message: bytes) -> bytes:
        return self._meet("first", message if self.rank == 0 else b"")[0]

    def everyone(self, message: bytes) -> list[bytes]:
        return self._meet("everyone", message)

    def agree(self, error: Exception | None) -> None:
        self._meet("agree", b"", error)

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        sizes = np.array([len(message) for message in messages], np.int64)
        sizes_RR = [np.frombuffer(row, np.int64) for row in self._meet("exchange", sizes.tobytes())]
        incoming = [int(row[self.rank]) for row in sizes_RR]
        outgoing = bytearray().join(messages)
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.frombuffer(outgoing, dtype=torch.uint8) if outgoing else torch.empty(0, dtype=torch.uint8)
        with self._bounded("exchange"):
            self._messages.alltoall_base(received, sent, incoming, sizes.tolist()).wait()
        ends = np.cumsum(incoming).tolist()
        data = received.numpy()
        return [data[end - size : end].tobytes() for size, end in zip(incoming, ends, strict=True)]

    # ------------------------------------------------------------ tensors

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = np.array([len(tensors), sum(tensor.numel() for tensor in tensors)], np.int64).tobytes()
        if len(set(self._meet("add", sizes))) > 1:
            raise _out_of_step("they add different tensors")
        for bucket in _buckets(tensors):
            whole = torch.cat([tensor.reshape(-1) for tensor in bucket]) if len(bucket) > 1 else bucket[0].contiguous()
            with self._bounded("add"):
                self._tensors.allreduce([whole]).wait()
            pieces = (
                torch.split_with_sizes(whole, [tensor.numel() for tensor in bucket]) if len(bucket) > 1 else (whole,)
            )
            for tensor, piece in zip(bucket, pieces, strict=True):
                if tensor is not piece:
                    tensor.copy_(piece.view(tensor.shape))

    # ------------------------------------------------------------ meetings

    def _meet(self, kind: str, message: bytes, error: Exception | None = None) -> list[bytes]:
        """What every rank says at this collective; raises where one has failed, or is at another."""
        if error is not None:
            message = _body(error)
        head = _HEAD.pack(error is not None, _KINDS.index(kind), len(message))
        frames = self._gathered(kind, head + message[:_ROOM], _FRAME)
        heads = [_HEAD.unpack_from(frame) for frame in frames]
        said = [frame[_HEAD.size : _HEAD.size + size] for frame, (_, _, size) in zip(frames, heads, strict=True)]
        failed = {rank: said[rank] for rank, (bad, _, _) in enumerate(heads) if bad}
        if failed:
            self._raise(failed, error)
        if len({at for _, at, _ in heads}) > 1:
            raise _out_of_step(", ".join(f"rank {rank} at `{_KINDS[at]}`" for rank, (_, at, _) in enumerate(heads)))
        longest = max(size for _, _, size in heads) - _ROOM
        if longest > 0:
            rest = self._gathered(kind, message[_ROOM:], longest)
            said = [(begun + more)[:size] for begun, more, (_, _, size) in zip(said, rest, heads, strict=True)]
        return said

    def _gathered(self, kind: str, message: bytes, size: int) -> list[bytes]:
        """`size` bytes of every rank, beginning with its message."""
        own = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        all_of = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        with self._bounded(kind):
            self._messages.allgather([all_of], [own]).wait()
        return [row.numpy().tobytes() for row in all_of]

    def _raise(self, failed: dict[int, bytes], own: Exception | None) -> NoReturn:
        """The same decision everywhere: who wants to stop comes first, then the lowest rank."""
        bodies = {rank: _ERROR.decode(body) for rank, body in failed.items()}
        rank = min(bodies, key=lambda rank: (bodies[rank].kind != Stopped.__name__, rank))
        if rank == self.rank and own is not None:
            raise own
        if bodies[rank].kind == Stopped.__name__:
            raise Stopped
        raise GivenUp(f"rank {rank} gave up: {bodies[rank].message}", bodies[rank].hint)

    @contextmanager
    def _bounded(self, kind: str) -> Iterator[None]:
        """What the backends raise when a deadline has passed or a peer has gone."""
        try:
            yield
        except RuntimeError as error:
            raise left_alone(self.rank, self.size, f"at `{kind}`", error) from error


def left_alone(rank: int, size: int, where: str, error: RuntimeError) -> PeerLost:
    """What a backend raises when a peer has gone or its deadline has passed, in our words."""
    why = _PLACE.sub("", str(error)).partition(". ")[0]
    return PeerLost(
        f"rank {rank} of {size} was left alone {where}: {why}", "another rank has died or hangs: its log says why"
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, up to so many bytes: few large sums are faster than many small ones."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        same = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not same or size + tensor.nbytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _body(error: Exception) -> bytes:
    body = to_body(error) if isinstance(error, RillflowError) else ErrorBody(type(error).__name__, str(error))
    return msgspec.msgpack.encode(ErrorBody(body.kind[:_LONGEST], _short(body.message), _short(body.hint)))


def _short(text: str) -> str:
    return text.encode()[:_LONGEST].decode(errors="ignore")


def _out_of_step(what: str) -> RunError:
    return RunError(
        f"the ranks are out of step: {what}",
        "nodes of a step graph must call the same methods of `peers` in the same order on every rank",
    )
