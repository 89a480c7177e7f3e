"""Who a rank is and where ranks meet. Without torch: the launcher starts its ranks before it loads that itself."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rillflow.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Which rank of how many, and where they meet (HOST:PORT). The default is a trainer of one rank."""

    rank: int = 0
    ranks: int = 1
    rendezvous: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"there is no rank {self.rank} of {self.ranks}", "ranks are counted from 0")


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket for `host_store`, at a free port unless one is given. Who connects early waits in its queue."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(4096)
    except OSError as error:
        server.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}", "rank 0 must run on the host that --rendezvous names"
        ) from error
    return server


def parse(rendezvous: str) -> tuple[str, int]:
    host, colon, port = rendezvous.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"{rendezvous!r} is not HOST:PORT", "for example --rendezvous 127.0.0.1:29400")
    return host.strip("[]"), int(port)
