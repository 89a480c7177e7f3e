"""Calls whose clients do not read, or go: bounded in memory and in time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from gateway_support import chunk, make_renderer
from serving import Served, served

from rillflow.gateway import lifetime
from rillflow.gateway.lifetime import Outbox
from rillflow.types import Chunk, GenerateRequest
from rillflow.wire.messages import Stream

WORD = make_renderer().encode("hello")


class Talker:
    """An engine that talks for as long as anyone listens."""

    context = 1 << 24

    def __init__(self) -> None:
        self.chunks = 0
        self.aborted = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        try:
            while True:
                await asyncio.sleep(0)
                self.chunks += 1
                yield chunk(WORD * 4096)
        finally:
            self.aborted.set()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


async def silent_client(gateway: Served, choices: int) -> socket.socket:
    """Asks for a stream and never reads it."""
    host, port = gateway.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    body = json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True, "n": choices}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
    return client


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_does_not_read_is_cut(choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "stalled", 0.3)
    async with served() as gateway:
        talker = Talker()
        policies = gateway.gateway._policies
        policies["policy"].engine = talker
        client = await silent_client(gateway, choices)
        session = gateway.gateway.sessions.get("s1")
        try:
            await asyncio.wait_for(talker.aborted.wait(), 30)
            # The connection is dropped, not left to wait for its reader.
            await until(lambda: not session.at_work and not gateway.gateway._listener.connections)
            # Sampled text waited only in the sockets, in the outbox and between the choices.
            assert talker.chunks * len(WORD) * 4096 * 5 < 64 << 20
            nodes = [node for node in session.tree("policy").nodes() if node.kind == "sampled"]
            assert all(node.abandoned for node in nodes)
        finally:
            client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_sent_again_after_its_connection_broke_is_the_same_draw(stream: bool) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": stream}
    async with served() as gateway:
        gateway.engine.scripts += [[None], [chunk(WORD, finish="stop")], [chunk(WORD, finish="stop")]]
        broken = asyncio.create_task(gateway.call("POST", "/v1/chat/completions", json=body))
        await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
        broken.cancel()
        await asyncio.gather(broken, return_exceptions=True)
        await until(lambda: bool(gateway.engine.aborted))
        for _ in range(2):
            status, _, _ = await gateway.call("POST", "/v1/chat/completions", json=body | {"stream": False})
            assert status == 200
        first, again, other = (request.sampling.seed for request in gateway.engine.requests)
        assert first == again != other


async def test_an_outbox_joins_what_waits_and_holds_its_writer() -> None:
    outbox = Outbox(bound=10)
    await outbox.put(b"one ")
    await outbox.put(b"two ")
    assert await outbox.take() == b"one two "
    writer = asyncio.create_task(outbox.put(b"a long event"))
    await asyncio.sleep(0)
    assert not writer.done()
    assert await outbox.take() == b"a long event"
    await writer
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    outbox.end(b"last")
    assert await reader == b"last"
    assert await outbox.take() == b""


async def test_an_outbox_that_ends_full_still_gives_all() -> None:
    outbox = Outbox(bound=4)
    writer = asyncio.create_task(outbox.put(b"event"))
    await asyncio.sleep(0)
    writer.cancel()
    outbox.end(b"error")
    assert await outbox.take() == b"eventerror"
    assert await outbox.take() == b""
    await asyncio.gather(writer, return_exceptions=True)


class HandClock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


async def test_a_stream_in_which_nothing_happens_shows_that_it_lives() -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True}
    clock = HandClock()
    async with served(clock=clock) as gateway, aiohttp.ClientSession() as http:
        gateway.engine.scripts.append([chunk(WORD), None, chunk(WORD, finish="stop")])
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
            read = b""
            for beats in (1, 2):
                clock.time += lifetime.QUIET
                while read.count(b": keep-alive\n\n") < beats:
                    read += await asyncio.wait_for(response.content.readany(), 60)
            gateway.engine.gate.set()
            read += await asyncio.wait_for(response.content.read(), 60)
    assert read.count(b": keep-alive\n\n") == 2
    events = [event for event in read.split(b"\n\n") if event and not event.startswith(b":")]
    assert events[-1] == b"data: [DONE]"
    said = [
        json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"].get("content", "") for event in events[:-1]
    ]
    assert "".join(said) == "hellohello"
