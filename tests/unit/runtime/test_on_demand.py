"""A port whose process starts with the first connection."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from rillflow.runtime.supervisor import OnDemand

# Serves one connection on the socket that it is given.
SERVER = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.setblocking(True)
connection, _ = listener.accept()
connection.sendall(b"here")
"""


async def test_the_first_connection_starts_the_process_which_answers_it() -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    port = OnDemand(started.put_nowait)
    await asyncio.sleep(0.05)
    assert started.empty()
    host, number = port.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    async with asyncio.timeout(60):
        handle = await started.get()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, str(handle), pass_fds=(handle,), env={**os.environ}
        )
        assert await reader.read() == b"here"
        await process.wait()
    assert started.empty()
    writer.close()
    port.close()


async def test_a_port_that_is_taken_is_replaced_and_a_closed_one_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        port = OnDemand(lambda handle: None, taken)
        number = int(port.url.rsplit(":", 1)[1])
        assert number != taken
    port.close()
    port.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", number)) != 0
