"""`Peers` over torch.distributed (messages by gloo, tensors by gloo or NCCL), and how ranks find each other.

Every collective begins with an all-gather of one fixed-size frame, which holds the kind of the collective and whether
the rank has failed. So a rank that abandons a step takes the others with it wherever they are, and ranks that are out
of step get an error that names their collectives. Small messages travel in the frame itself. Every wait ends at the
deadline of its process group; a dead peer ends it at once.

Ranks meet at a TCP store whose address all of them know, then connect to each other. They listen only on the interface
that leads to that address. Messages are bytes and nothing is pickled. Not protected against: messages have no token, so
anyone who can reach the ports can join. On loopback, the default, nothing can be reached from outside; on several hosts
only trusted machines may reach the network.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from rillflow.errors import ErrorBody, RillflowError, RunError, to_body
from rillflow.storage import startup
from rillflow.trainer.parallel import Alone, GivenUp, PeerLost, Peers, Stopped
from rillflow.trainer.parallel.launch import Place, listen, parse
from rillflow.weights.models import pick_device

if TYPE_CHECKING:
    import numpy.typing as npt


_FRAME = 1024
_HEAD = struct.Struct("<BBq")  # failed, which collective, bytes of the message
_ROOM = _FRAME - _HEAD.size
_LONGEST = 240  # bytes of an error's message and of its hint: they must fit into a frame
_PLACE = re.compile(r"^\[\S+\.\w+:\d+\] ")  # a place in the backend's source
_KINDS = ("total", "highest", "first", "everyone", "exchange", "add", "agree")
# Built at import: msgspec crashes if several threads decode a type for the first time.
_ERROR = msgspec.msgpack.Decoder(ErrorBody)
_BUCKET = 64 << 20  # bytes of small tensors that are added at once


class Distributed:
    """Peers for one thread. `tensors` is the group that adds tensors; by default it is the group of the messages."""

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
        """Return the messages of all ranks at this collective; raise if a rank has failed or is at another one."""
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
        """Return `size` bytes of every rank, padded messages."""
        own = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        all_of = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        with self._bounded(kind):
            self._messages.allgather([all_of], [own]).wait()
        return [row.numpy().tobytes() for row in all_of]

    def _raise(self, failed: dict[int, bytes], own: Exception | None) -> NoReturn:
        """Raise the same error everywhere: Stopped first, else that of the lowest rank."""
        bodies = {rank: _ERROR.decode(body) for rank, body in failed.items()}
        rank = min(bodies, key=lambda rank: (bodies[rank].kind != Stopped.__name__, rank))
        if rank == self.rank and own is not None:
            raise own
        if bodies[rank].kind == Stopped.__name__:
            raise Stopped
        raise GivenUp(f"rank {rank} gave up: {bodies[rank].message}", bodies[rank].hint)

    @contextmanager
    def _bounded(self, kind: str) -> Iterator[None]:
        """Turn a backend's error (a deadline, a dead peer) into PeerLost."""
        try:
            yield
        except RuntimeError as error:
            raise peer_lost(self.rank, self.size, f"at `{kind}`", error) from error


def peer_lost(rank: int, size: int, where: str, error: RuntimeError) -> PeerLost:
    """Return a backend's error (a deadline, a dead peer) as PeerLost."""
    why = _PLACE.sub("", str(error)).partition(". ")[0]
    return PeerLost(
        f"rank {rank} of {size} lost its peers {where}: {why}", "another rank has died or hangs: read its log"
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield adjacent tensors of one dtype and device, up to `_BUCKET` bytes: few large sums are faster than many
    small."""
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


# ---------------------------------------------------------------- how ranks find each other


# Seconds to wait for a rank within a step: longer than any publication or checkpoint should take.
PATIENCE = 600.0
# Seconds to wait at the start, when ranks load their libraries or are started by hand.
START = 300.0
_GLOO = "gloo/"  # in the messages of gloo's errors, which have no class of their own


def host_store(server: socket.socket, patience: float = PATIENCE) -> TCPStore:
    """Serve the store on `server` while the returned object lives."""
    host, port = server.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=patience),
        master_listen_fd=server.detach(),
    )


@contextmanager
def connect(place: Place, device: torch.device, *, start: float = START, patience: float = PATIENCE) -> Iterator[Peers]:
    """Yield the peers of a rank, which has none if it is the only one; else as `together`."""
    if place.ranks == 1:
        yield Alone()
        return
    with together(place, device, start=start, patience=patience) as peers:
        yield peers


@contextmanager
def together(
    place: Place, device: torch.device, *, start: float = START, patience: float = PATIENCE
) -> Iterator[Peers]:
    """Yield the peers once all ranks have connected, within `start` seconds; also set torch's default process group.

    Rank 0 hosts the store if nothing answers at the address.
    """
    startup.doing("waiting for the other ranks")
    host, port = parse(place.rendezvous)
    hosted = host_store(listen(host, port)) if place.rank == 0 and not _answers(host, port) else None
    address = _address_towards(host, port)
    _use_interface(address)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=start))
        messages = _messages(store, place, address, start)
        tensors = _default_group(store, place, device, patience)
    except RuntimeError as error:
        raise PeerLost(
            f"rank {place.rank} of {place.ranks} has not connected to all others within {start:.0f} s: {error}",
            "start every rank with the same --ranks and --rendezvous, each with its own --rank",
        ) from error
    messages._set_default_timeout(timedelta(seconds=patience))  # type: ignore[attr-defined]
    try:
        yield Distributed(place.rank, place.ranks, messages, tensors)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _GLOO in str(error):
            raise peer_lost(place.rank, place.ranks, "inside the model", error) from error
        raise
    # After an error the groups stay: the others may be in the middle of a collective, and the process ends anyway.
    dist.destroy_process_group()
    del hosted


def device_of(wanted: str, rank: int) -> torch.device:
    """Return a rank's device; `cuda` without a number gives each rank of a host its own GPU."""
    device = pick_device(wanted)
    if str(device) == "cuda":
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def _messages(store: TCPStore, place: Place, address: str, start: float) -> ProcessGroup:
    """Make a separate group, so that messages never mix with the traffic of sharded models."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=start)
    # It has the methods of a group; torch's stubs lack them.
    return cast(ProcessGroup, ProcessGroupGloo(PrefixStore("messages", store), place.rank, place.ranks, options))


def _default_group(store: TCPStore, place: Place, device: torch.device, patience: float) -> ProcessGroup:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("tensors", store),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=patience),
        device_id=device if device.type == "cuda" else None,
    )
    return dist.distributed_c10d._get_default_group()


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to the rendezvous. Sends nothing."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _use_interface(address: str) -> None:
    """Set the interface of torch's default group in the environment, unless the user has set one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
