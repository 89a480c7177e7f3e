"""An engine host behind HTTP: real sockets, and everything that can happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec
import pytest

from counting_engine import CountingEngine, expected, request, until
from rillflow.engine import remote as module
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import KEEP_ALIVE, EngineService, Frame, Hold, RemoteEngine, encode
from rillflow.errors import BadRequest, ContextOverflow, EngineLost, QueueFull
from rillflow.types import Chunk

TOKEN = "t" * 32


class World:
    """One engine, its service and a remote that reaches it."""

    def __init__(self, **settings: Any) -> None:
        self.engine = CountingEngine(**settings)
        self.host = EngineHost("e", {"p": self.engine})
        self.service = EngineService(self.host, TOKEN, idle=0.02)
        self.remote: RemoteEngine

    async def start(self) -> None:
        self.url = await self.service.start()
        self.remote = RemoteEngine("e", self.url, TOKEN, stall=20)

    async def stop(self) -> None:
        await self.remote.close()
        await self.service.stop()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
async def slow() -> AsyncIterator[World]:
    """Samples only what it is given."""
    world = World(hand_out=True)
    await world.start()
    yield world
    await world.stop()


async def collect(remote: RemoteEngine, asked: Any, chunks: list[Chunk] | None = None) -> list[Chunk]:
    chunks = [] if chunks is None else chunks
    async with aclosing(remote.generate("p", asked)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
    return chunks


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


async def test_chunks_come_as_they_are_sampled(slow: World) -> None:
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(slow.remote, request(), chunks))
    for count in (1, 2, 3):
        slow.engine.give(1)
        await until(lambda count=count: len(chunks) == count)
    slow.engine.give(100)
    await task
    assert tokens(chunks) == expected(request())
    assert chunks[-1].finish == "length"
    assert slow.remote.known.versions == {"p": 0}


async def test_many_calls_share_connections(world: World) -> None:
    for number in range(20):
        assert tokens(await collect(world.remote, request(str(number)))) == expected(request())
    assert len(world.remote._connections._free) == 1


async def test_closing_the_stream_aborts_the_request(slow: World) -> None:
    slow.engine.give(1)
    stream = slow.remote.generate("p", request())
    await anext(stream)
    assert slow.engine.open == 1
    await stream.aclose()
    await until(lambda: slow.engine.open == 0)


async def test_a_held_engine_is_silent_and_alive(slow: World) -> None:
    """Longer than the stall deadline: signs of life come all the time."""
    chunks: list[Chunk] = []
    impatient = RemoteEngine("e", slow.url, TOKEN, stall=0.5)  # 25 times the pause between two signs
    task = asyncio.create_task(collect(impatient, request(), chunks))
    slow.engine.give(2)
    await until(lambda: len(chunks) == 2)
    info = await slow.remote.hold("weights")
    assert info.paused == slow.remote.known.paused == "weights"
    slow.engine.give(100)
    await asyncio.sleep(0.8)
    assert len(chunks) == 2
    await slow.remote.release("weights")
    await task
    await impatient.close()
    assert tokens(chunks) == expected(request())


async def test_a_move_ends_the_stream_between_two_tokens(slow: World) -> None:
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(slow.remote, request(), chunks))
    slow.engine.give(5)
    await until(lambda: len(chunks) == 5)
    await slow.remote.hold("train", move=True)
    await task
    assert tokens(chunks) == expected(request())[:5]
    assert chunks[-1].finish == "abort"


async def test_stopping_the_service_sends_answers_away(slow: World) -> None:
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(slow.remote, request(), chunks))
    slow.engine.give(5)
    await until(lambda: len(chunks) == 5)
    await slow.service.stop()
    await task
    assert (chunks[-1].finish, chunks[-1].seam) == ("abort", "moved")


async def test_what_is_wrong_with_the_request_comes_back_as_it_is(world: World) -> None:
    world.engine.context = 3
    with pytest.raises(ContextOverflow):
        await collect(world.remote, request())
    world.engine.context, world.engine._slots, world.engine._queue = 100, 0, 0
    with pytest.raises(QueueFull):
        await collect(world.remote, request())
    with pytest.raises(BadRequest, match="no policy"):
        await anext(world.remote.generate("other", request()))


async def test_an_engine_that_breaks_in_the_middle_is_lost(slow: World) -> None:
    chunks: list[Chunk] = []
    task = asyncio.create_task(collect(slow.remote, request(), chunks))
    slow.engine.give(2)
    await until(lambda: len(chunks) == 2)
    slow.engine.break_down()
    with pytest.raises(EngineLost):
        await task
    assert tokens(chunks) == expected(request())[:2]


async def test_closing_ends_what_waits_for_the_engine(slow: World) -> None:
    remote = RemoteEngine("e", slow.url, TOKEN, stall=60)
    slow.engine.give(1)
    begun: list[Chunk] = []
    unbegun: list[Chunk] = []
    tasks = [
        asyncio.create_task(collect(remote, request(name), chunks)) for name, chunks in (("a", begun), ("b", unbegun))
    ]
    await until(lambda: slow.engine.open == 2 and len(begun) + len(unbegun) == 1)
    await remote.close()
    for task in tasks:
        with pytest.raises(EngineLost):
            await asyncio.wait_for(task, 60)
    with pytest.raises(EngineLost, match="has gone"):
        await collect(remote, request())


async def test_an_engine_that_is_not_there_is_lost() -> None:
    remote = RemoteEngine("e", "http://127.0.0.1:1", TOKEN)
    with pytest.raises(EngineLost, match="cannot be reached"):
        await collect(remote, request())
    with pytest.raises(EngineLost):
        await remote.info()
    await remote.close()


async def test_another_token_opens_nothing(world: World) -> None:
    stranger = RemoteEngine("e", world.url, "x" * 32)
    with pytest.raises(EngineLost, match="token"):
        await collect(stranger, request())
    with pytest.raises(EngineLost, match="token"):
        await stranger.hold("mischief")
    await stranger.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        KEEP_ALIVE + b"\x07",
        b"\xff\xff\xff\xff",
        (3).to_bytes(4, "little") + b"abc",
        encode(Frame(chunk=Chunk(tokens=[1], logprobs=[0.0], raw_logprobs=[0.0], version=0))),
        None,
    ],
    ids=["nothing", "torn", "endless", "garbage", "no end", "silence"],
)
async def test_odd_answers_are_a_lost_engine(answer: bytes | None) -> None:
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        if answer is None:
            await reader.read()  # until the client has gone
        else:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    remote = RemoteEngine("e", f"http://127.0.0.1:{port}", TOKEN, stall=0.3)
    with pytest.raises(EngineLost):
        await collect(remote, request())
    await remote.close()
    server.close()
    await asyncio.wait_for(over.wait(), 60)


async def test_bad_bodies_and_holds_are_refused(world: World) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path, body in [("/generate", b"x"), ("/pause", b"\x80"), ("/generate", b"")]:
            async with session.post(world.url + path, data=body) as response:
                assert response.status == 400
    for hold in [Hold(reason=""), Hold(reason="x", seconds=-1.0), Hold(reason="x", seconds=float("nan"))]:
        with pytest.raises(BadRequest):
            await world.remote.hold(hold.reason, seconds=hold.seconds)


async def test_an_answer_that_is_not_awaited_when_its_engine_goes_ends_at_once_too(slow: World) -> None:
    patient = RemoteEngine("e", slow.url, TOKEN, stall=60)
    stream = patient.generate("p", request())
    slow.engine.give(1)
    await anext(stream)
    await patient.close()
    async with asyncio.timeout(60):
        with pytest.raises(EngineLost):
            await anext(stream)


async def test_what_an_engine_would_not_say_of_a_request_is_a_loss() -> None:
    """Another program may have its port, or another run's engine."""
    stranger = EngineService(EngineHost("x", {"p": CountingEngine()}), "s" * 32)
    remote = RemoteEngine("e", await stranger.start(), TOKEN)
    with pytest.raises(EngineLost):
        await collect(remote, request())
    for ask in (remote.info(), remote.hold("r"), remote.release("r")):
        with pytest.raises(EngineLost):
            await ask
    await remote.close()
    await stranger.stop()


async def test_what_the_engine_said_itself_is_not_undone_by_older_news(world: World, monkeypatch: Any) -> None:
    """The roster's news are up to a beat and a look old."""
    old = await world.remote.info()
    await world.engine.load({}, 5)
    await world.remote.hold("train")
    world.remote.hear(msgspec.structs.replace(old, running=3))
    known = world.remote.known
    assert (known.versions, known.paused, known.running) == ({"p": 5}, "train", 3)
    await world.remote.release("train")
    world.remote.hear(msgspec.structs.replace(old, paused="train"))
    assert world.remote.known.paused == ""
    await world.engine.load({}, 6)
    await collect(world.remote, request())
    monkeypatch.setattr(module, "NEWS_SECONDS", 0.0)
    world.remote.hear(old)
    assert world.remote.known == old, "later, whoever knows something is believed"


async def test_newer_weights_are_believed_although_no_token_has_told_of_them(world: World) -> None:
    """A node that waits for newer weights samples nothing: it learns of them from the roster alone."""
    await world.engine.load({}, 1)
    await collect(world.remote, request())
    world.remote.hear(msgspec.structs.replace(world.remote.known, versions={"p": 3}))
    assert world.remote.known.versions == {"p": 3}


async def test_news_of_one_policy_do_not_hide_those_of_another(world: World) -> None:
    world.remote.hear(msgspec.structs.replace(world.remote.known, versions={"p": 0, "q": 0}))
    await world.engine.load({}, 1)
    await collect(world.remote, request())
    world.remote.hear(msgspec.structs.replace(world.remote.known, versions={"p": 0, "q": 4}, paused="train"))
    assert world.remote.known.versions == {"p": 1, "q": 4}
    assert world.remote.known.paused == "train"


async def test_an_answer_that_breaks_off_by_our_own_fault_is_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def frames(*_: Any) -> AsyncIterator[Chunk]:
        yield Chunk(tokens=[1], logprobs=[0.0], raw_logprobs=[0.0], version=0)
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(world.host, "frames", frames)
    with pytest.raises(EngineLost):
        await collect(world.remote, request())
    assert "a mistake of ours" in caplog.text
