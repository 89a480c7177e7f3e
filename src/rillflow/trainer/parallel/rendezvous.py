"""How ranks find each other: a store at an address that all of them are told, then one connection between any two.

Everything listens on the interface that leads to that address and on no other: on loopback, nothing can be reached
from outside. Messages have no token: on a network of several hosts, only machines that are trusted may reach it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from rillflow.storage import startup
from rillflow.trainer.parallel.address import Place, listen, parse
from rillflow.trainer.parallel.distributed import Distributed, left_alone
from rillflow.trainer.parallel.peers import Alone, PeerLost, Peers
from rillflow.weights.models import pick_device

# How long a rank may be waited for within a step: longer than any publication or checkpoint should take.
PATIENCE = 600.0
# And at the beginning, where ranks load their libraries and are started by hand.
START = 300.0
_GLOO = "gloo/"  # in the messages of its errors, which have no class of their own


def host_store(server: socket.socket, patience: float = PATIENCE) -> TCPStore:
    """Serve the store on `server` for as long as the answer lives."""
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
    """All ranks, once each of them has come, within `start` seconds; torch's own default group is of them too.

    Rank 0 hosts the store where nobody does.
    """
    if place.ranks == 1:
        yield Alone()
        return
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
            f"rank {place.rank} of {place.ranks} has not met all others within {start:.0f} s: {error}",
            "start every rank with the same --ranks and --rendezvous, each with its own --rank",
        ) from error
    messages._set_default_timeout(timedelta(seconds=patience))  # type: ignore[attr-defined]
    try:
        yield Distributed(place.rank, place.ranks, messages, tensors)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _GLOO in str(error):
            raise left_alone(place.rank, place.ranks, "inside a sharded model", error) from error
        raise
    # After an error nothing is taken apart: the others may be in the middle of anything, and the process ends anyway.
    dist.destroy_process_group()
    del hosted


def device_of(wanted: str, rank: int) -> torch.device:
    """Where a rank computes: `cuda` without a number gives each rank of a host its own."""
    device = pick_device(wanted)
    if str(device) == "cuda":
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def _messages(store: TCPStore, place: Place, address: str, start: float) -> ProcessGroup:
    """A group of its own, so that messages never mix with what sharded models send."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=start)
    # It has the methods of a group; only torch's stubs do not know it.
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
    """This machine's own address on the way to the rendezvous. Nothing is sent."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _use_interface(address: str) -> None:
    """The backends of torch's default group take it from the environment; what the user has set there stays."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
