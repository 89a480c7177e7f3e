"""A port whose process is started by the first connection to it, so that it costs nothing until then.

The connections of the meantime wait in the socket's queue: the process takes the socket over and serves them. It is
for what a run can do without: that the port cannot be opened is reported, and nothing else comes of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_WAITING = 64  # connections


class OnDemand:
    """Listens on loopback; `start` is called once, with the socket's file descriptor, at the first connection."""

    def __init__(self, start: Callable[[int], None], port: int = 0) -> None:
        """The port that it had before is only a wish. OSError where nothing can be opened."""
        self._start = start
        try:
            self._listener = _listen(port)
        except OSError:
            self._listener = _listen(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._knock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _knock(self) -> None:
        self._loop.remove_reader(self._listener)
        self._start(self._listener.fileno())

    def close(self) -> None:
        """Refuse further connections, unless the started process has taken the socket over."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
