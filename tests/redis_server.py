"""A real Redis server for tests, on a free port, with a folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from needs import require

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One process; `kill` and `start` again keep its folder and its port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        require("redis-server")
        binary = shutil.which("redis-server")
        assert binary is not None
        self._folder.mkdir(exist_ok=True)
        where = ("--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", "")
        self._process = subprocess.Popen([binary, *where, *self._options], stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url, socket_timeout=1) as client:
            for _ in range(200):
                with suppress(redis.RedisError):
                    client.ping()
                    return
                time.sleep(0.05)
        raise TimeoutError("redis-server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
