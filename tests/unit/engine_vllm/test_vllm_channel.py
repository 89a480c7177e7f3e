"""The channel, over a real WebSocket, into an engine that stands for vLLM's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from counting_engine import until
from rillflow.config.policy import EngineConfig
from rillflow.engine.experts import unpack
from rillflow.engine.servers.calls import is_scored, needs_both
from rillflow.engine.servers.inside import rillflow_channel
from rillflow.engine.servers.inside.rillflow_channel import PATH, SHUT, TOKEN, Channel
from rillflow.engine.servers.vllm import VllmEngine, _Chosen
from rillflow.engine.servers.vllm_server import ChannelClient
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import EngineError, EngineLost
from rillflow.types import Grammar, Sampling

SECRET = "s" * 43


class FakeLLM:
    """vLLM's AsyncLLM, as far as the channel uses it: samples only as many tokens as it is given."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}
        self.asked: list[tuple[Any, Any]] = []
        self.named: list[Any] = []  # the adapters of all that was asked
        self.adapters: dict[int, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.errored = False
        self.top = -1  # the id of the top token, where one is asked for
        self.experts: Any = None  # that come with the last part of every answer
        self.deaf = 0  # aborts that it does not hear, as those of a request that it does not know yet
        self._allowance = 0
        self._turn = asyncio.Event()

    def give(self, tokens: int) -> None:
        self._allowance += tokens
        self._turn.set()
        self._turn = asyncio.Event()

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any = None) -> AsyncIterator[Any]:
        self.asked.append((prompt, params))
        self.named.append(lora_request)
        if prompt["prompt_token_ids"] == [666]:
            raise ValueError("no such prompt")
        cut = self.running[name] = asyncio.Event()
        try:
            for number in range(params["max_tokens"]):
                if "prompt_logprobs" in params and self._allowance:
                    yield _scored(prompt["prompt_token_ids"])
                    return
                while not self._allowance:
                    if cut.is_set():
                        yield _output([], "abort")
                        return
                    await self._turn.wait()
                self._allowance -= 1
                finish = "length" if number + 1 == params["max_tokens"] else None
                made = _output([number], finish, params.get("logprobs", 0), self.top)
                made.outputs[0].routed_experts = None if finish is None else self.experts
                yield made
        finally:
            self.running.pop(name, None)

    async def abort(self, names: list[str]) -> None:
        deaf, self.deaf = self.deaf, max(0, self.deaf - 1)
        for name in names:
            if name in self.running and not deaf:
                self.running[name].set()
        self.give(0)

    async def add_lora(self, request: Any) -> bool:
        if request[2] == "missing":
            raise FileNotFoundError("no such adapter")
        self.adapters[request[1]] = request
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None

    async def collective_rpc(self, method: str, args: Any) -> Any:
        self.calls.append((method, args))
        if method == "rillflow_broken":
            raise RuntimeError("out of memory")
        return [{"rank": 0}]


def _output(tokens: list[int], finish: str | None, top: int = 0, top_id: int = -1) -> Any:
    """Each token's log-prob, and behind it that of a top token: -50 and the token."""
    flat = SimpleNamespace(
        logprobs=[value for token in tokens for value in (-float(token), -50.0 - token)[: 1 + top]],
        token_ids=[value for token in tokens for value in (token, top_id)[: 1 + top]],
    )
    part = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=finish)
    return SimpleNamespace(outputs=[part], num_cached_tokens=2, finished=finish is not None, prompt_logprobs=None)


def _scored(tokens: list[int]) -> Any:
    """The log-probs of a prompt's tokens: -100 and its place."""
    output = _output([0], "length")
    rows = [{token: SimpleNamespace(logprob=-100.0 - at)} for at, token in enumerate(tokens)]
    output.prompt_logprobs = [None, *rows[1:]]
    return output


async def _asgi(channel: Channel, llm: FakeLLM, request: web.Request) -> web.StreamResponse:
    """Serve an ASGI application as uvicorn does."""
    socket = web.WebSocketResponse(max_msg_size=16 << 20)  # as uvicorn's
    accepted = False

    async def receive() -> Any:
        if not accepted:
            return {"type": "websocket.connect"}
        frame = await socket.receive()
        if frame.type is aiohttp.WSMsgType.BINARY:
            return {"type": "websocket.receive", "bytes": frame.data}
        return {"type": "websocket.disconnect"}

    async def send(event: Any) -> None:
        nonlocal accepted
        if event["type"] == "websocket.accept":
            await socket.prepare(request)
            accepted = True
        elif event["type"] == "websocket.send":
            await socket.send_bytes(event["bytes"])

    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    app = SimpleNamespace(state=SimpleNamespace(engine_client=llm))
    await channel({"type": "websocket", "path": request.path, "headers": headers, "app": app}, receive, send)
    return socket if accepted else web.Response(status=403)


class World:
    def __init__(self) -> None:
        self.llm = FakeLLM()
        self.url = ""


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    params = ModuleType("vllm.sampling_params")
    params.SamplingParams = dict  # type: ignore[attr-defined]
    params.StructuredOutputsParams = dict  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    request = ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, number, path: (name, number, path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setenv(TOKEN, SECRET)
    world = World()
    channel = Channel(None)

    async def serve(request: web.Request) -> web.StreamResponse:
        return await _asgi(channel, world.llm, request)

    app = web.Application()
    app.router.add_get(PATH, serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    world.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield world
    await runner.cleanup()


@pytest.fixture
async def client(world: World) -> AsyncIterator[ChannelClient]:
    client = ChannelClient(world.url, SECRET)
    await client.open()
    yield client
    await client.close()


def ask(client: ChannelClient, count: int = 3, tokens: list[int] | None = None, **more: Any) -> Any:
    return client.ask(
        tokens=tokens or [5, 6, 7], temperature=1.0, top_p=1.0, top_k=0, max_tokens=count, stop=[2], salt="3", **more
    )


async def read(answer: Any) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        part = await answer.next()
        tokens += part.tokens
        assert part.logprobs == [-float(token) for token in part.tokens]
        if part.finish or part.error:
            return tokens, part.finish or part.error


async def test_requests_travel_with_all_that_matters(world: World, client: ChannelClient) -> None:
    world.llm.give(100)
    answers = [ask(client, count)[1] for count in (3, 5, 8)]
    assert [await read(answer) for answer in answers] == [(list(range(count)), "length") for count in (3, 5, 8)]
    prompt, params = world.llm.asked[0]
    assert prompt == {"type": "token", "prompt_token_ids": [5, 6, 7], "cache_salt": "3"}
    assert (params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == ([2], True, 0)
    assert (params["seed"], params["structured_outputs"]) == (None, None)


async def test_both_log_probs_come_with_each_part(world: World, client: ChannelClient) -> None:
    world.llm.give(100)
    _, answer = ask(client, 3, both=True)
    parts = [await answer.next() for _ in range(3)]
    assert [(part.tokens, part.logprobs, part.raw) for part in parts] == [
        ([0], [0.0], [-50.0]), ([1], [-1.0], [-51.0]), ([2], [-2.0], [-52.0]),
    ]  # fmt: skip
    assert world.llm.asked[0][1]["logprobs"] == 1


async def test_a_sampler_that_is_not_ours_is_refused_by_name(world: World, client: ChannelClient) -> None:
    """As with speculative decoding: the value is that of a top token then."""
    world.llm.give(100)
    world.llm.top = 0
    _, answer = ask(client, 3, both=True)
    assert "speculative decoding" in (await answer.next()).error


@pytest.mark.parametrize(("kind", "named"), [("json", "json"), ("regex", "regex"), ("lark", "grammar")])
async def test_an_answer_under_a_grammar_comes_whole_and_scored(
    world: World, client: ChannelClient, kind: str, named: str
) -> None:
    world.llm.give(100)
    _, answer = ask(client, 4, grammar=(kind, "text"), scored=True, seed=9)
    part = await answer.next()
    assert (part.tokens, part.logprobs, part.finish) == ([0, 1, 2, 3], [-0.0, -1.0, -2.0, -3.0], "length")
    assert part.raw == [-103.0, -104.0, -105.0, -106.0], "of its tokens, behind a prompt of three"
    (_, params), (scored, _) = world.llm.asked
    assert (params["structured_outputs"], params["seed"]) == ({named: "text"}, 9)
    assert scored == {"type": "token", "prompt_token_ids": [5, 6, 7, 0, 1, 2, 3], "cache_salt": "3"}


async def test_several_prompts_are_scored_by_one_call(world: World, client: ChannelClient) -> None:
    world.llm.give(1)
    scores = await client.call("score", [[5, 6, 7], [8, 9]], "3-probe-0", deadline=60.0)
    assert scores == [[-101.0, -102.0], [-101.0]]
    assert [(prompt["prompt_token_ids"], prompt["cache_salt"]) for prompt, _ in world.llm.asked] == [
        ([5, 6, 7], "3-probe-0"), ([8, 9], "3-probe-0"),
    ]  # fmt: skip
    assert {params["max_tokens"] for _, params in world.llm.asked} == {1}


@pytest.mark.parametrize("sampled", [2, 4])
async def test_an_answer_under_a_grammar_that_is_cut_leaves_nothing(
    world: World, client: ChannelClient, sampled: int
) -> None:
    """While it is sampled, or while it is scored."""
    _, answer = ask(client, 4, grammar=("json", "{}"), scored=True)
    world.llm.give(sampled)
    await until(lambda: len(world.llm.asked) == (1 if sampled < 4 else 2) and not world.llm._allowance)
    await client.call("cut", deadline=5.0)
    part = await answer.next()
    assert (part.tokens, part.raw, part.finish) == ([], [], "abort")
    assert not world.llm.running


async def test_long_prompts_of_many_requests_travel_at_once(world: World, client: ChannelClient) -> None:
    """As after a cut, when all of them go on."""
    world.llm.give(100)
    answers = [ask(client, 2, [70_000] * 400_000)[1] for _ in range(10)]
    assert [await read(answer) for answer in answers] == [([0, 1], "length")] * 10


async def test_a_reply_does_not_wait_for_parts_to_gather(
    world: World, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rillflow_channel, "_GATHER_SECONDS", 600.0)
    await client.call("cut", deadline=5.0)
    world.llm.give(1)
    _, answer = ask(client, 1)
    await until(lambda: not world.llm.running and len(world.llm.asked) == 1)
    await client.call("cut", deadline=5.0)
    assert await read(answer) == ([0], "length"), "and takes with it what there is"


async def test_what_cannot_be_sent_ends_the_channel(client: ChannelClient) -> None:
    _, answer = ask(client, 2**70)
    with pytest.raises(EngineLost, match="broke"):
        async with asyncio.timeout(60):
            await answer.next()


async def test_a_cut_is_answered_after_all_that_was_sampled(world: World, client: ChannelClient) -> None:
    _, answer = ask(client, 10)
    world.llm.give(4)
    await client.call("cut", deadline=5.0)
    tokens, finish = await read(answer)
    assert (len(tokens) <= 4, finish) == (True, "abort")
    assert not world.llm.running
    world.llm.give(10)
    _, later = ask(client, 2)
    assert await read(later) == ([0, 1], "length"), "later ones are sampled"


@pytest.mark.parametrize("deaf", [3, 1 << 30])
async def test_a_cut_reaches_requests_that_vllm_does_not_know_yet(
    world: World, client: ChannelClient, deaf: int
) -> None:
    """They are aborted again, and cancelled in the end."""
    world.llm.deaf = deaf
    _, answer = ask(client, 10)
    await client.call("cut", deadline=60.0)
    assert (await read(answer))[1] == "abort"
    await until(lambda: not world.llm.running)


async def test_dropped_answers_are_aborted(world: World, client: ChannelClient) -> None:
    number, _ = ask(client, 10)
    await until(lambda: len(world.llm.running) == 1)
    client.drop(number)
    await until(lambda: not world.llm.running)


async def test_a_channel_that_closes_takes_its_requests_with_it(world: World) -> None:
    client = ChannelClient(world.url, SECRET)
    await client.open()
    _, answer = ask(client, 10)
    await until(lambda: len(world.llm.running) == 1)
    await client.close()
    with pytest.raises(EngineLost):
        await answer.next()
    with pytest.raises(EngineLost):
        await client.call("cut", deadline=5.0)
    await until(lambda: not world.llm.running)


async def test_errors_come_back_and_hurt_nobody_else(world: World, client: ChannelClient) -> None:
    world.llm.give(100)
    _, bad = ask(client, 3, [666])
    _, good = ask(client, 3)
    assert (await read(bad)) == ([], "ValueError: no such prompt")
    assert (await read(good))[1] == "length"
    with pytest.raises(EngineError, match="out of memory"):
        await client.call("rillflow_broken", deadline=5.0)
    with pytest.raises(EngineError, match="there is no"):
        await client.call("shutdown", deadline=5.0)
    assert await client.call("rillflow_layout", {"a": [1]}, "float32", deadline=5.0) == [{"rank": 0}]
    assert world.llm.calls[-1] == ("rillflow_layout", ({"a": [1]}, "float32"))


async def test_it_opens_to_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("", "x" * 43):
        with pytest.raises(EngineLost, match="opens no channel"):
            await ChannelClient(world.url, token).open()
    monkeypatch.delenv(TOKEN)
    passed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    sent = []

    async def send(event: Any) -> None:
        sent.append(event["type"])

    shut = Channel(app)
    headers = [(b"authorization", b"Bearer ")]
    await shut({"type": "websocket", "path": PATH, "headers": headers}, receive, send)
    assert sent == ["websocket.close"], "without a token of its own it opens to nobody at all"
    await shut({"type": "http", "path": PATH}, receive, send)
    await shut({"type": "websocket", "path": "/other"}, receive, send)
    assert passed == [PATH, "/other"]


async def test_a_cut_ends_the_answers_of_one_connection_alone(world: World, client: ChannelClient) -> None:
    other = ChannelClient(world.url, SECRET)
    await other.open()
    try:
        _, mine = ask(client, 50)
        _, others = ask(other, 5)
        await until(lambda: len(world.llm.running) == 2)
        await client.call("cut", deadline=5.0)
        assert (await read(mine))[1] == "abort"
        world.llm.give(100)
        assert (await read(others))[1] == "length"
        assert (await read(ask(client, 3)[1]))[1] == "length", "later ones are sampled"
    finally:
        await other.close()


async def test_requests_name_the_adapter_that_they_want(world: World, client: ChannelClient) -> None:
    world.llm.give(100)
    assert await client.call("add_adapter", 7, "/folder", deadline=5.0)
    assert world.llm.adapters == {7: ("rillflow-7", 7, "/folder")}
    for more in ({}, {"adapter": 7}, {"adapter": 7, "scored": True}):
        await read(ask(client, 3, **more)[1])
    await client.call("score", [[5, 6, 7]], "salt", 7, deadline=5.0)
    numbers = [named and named[1] for named in world.llm.named]
    assert numbers == [None, 7, 7, 7, 7], "an answer that is scored asks twice"
    assert len({named[2] for named in world.llm.named if named}) == 1, "the folder is part of vLLM's cache key"
    with pytest.raises(EngineError, match="no such adapter"):
        await client.call("add_adapter", 8, "missing", deadline=5.0)
    await client.call("drop_adapter", 7, deadline=5.0)
    assert not world.llm.adapters


async def test_a_server_that_is_shut_tells_nothing_but_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(event: Any) -> None:
        sent.append(event.get("status") or event["type"])

    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setenv(SHUT, "1")
    shut = Channel(app)
    for headers in ([], [(b"authorization", b"Bearer wrong")]):
        for kind, path in (("http", "/v1/completions"), ("websocket", "/v1/realtime"), ("http", "/health")):
            await shut({"type": kind, "path": path, "headers": headers}, receive, send)
    assert sent == [401, "http.response.body", "websocket.close"] * 2
    headers = [(b"authorization", f"Bearer {SECRET}".encode())]
    await shut({"type": "http", "path": "/v1/models", "headers": headers}, receive, send)
    assert passed == ["/health", "/health", "/v1/models"]


async def test_nonsense_ends_the_channel(world: World) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession() as session:
        socket = await session.ws_connect(world.url + PATH, headers=headers)
        await socket.send_bytes(msgspec.msgpack.encode([["ask", 1]]))
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


@pytest.mark.parametrize(
    ("sampling", "scored", "both"),
    [
        (Sampling(), False, False),
        (Sampling(temperature=0.0, top_p=0.9, top_k=5), False, False),
        (Sampling(temperature=0.6), False, True),
        (Sampling(top_p=0.9), False, True),
        (Sampling(temperature=0.6, top_k=20), False, True),
        (Sampling(temperature=0.6, top_k=20, grammar=Grammar(kind="json", text="{}")), True, False),
    ],
)
def test_a_server_is_asked_for_the_log_probs_that_differ(sampling: Sampling, scored: bool, both: bool) -> None:
    assert (is_scored(sampling), needs_both(sampling)) == (scored, both)


def test_no_two_starts_share_a_prefix_cache() -> None:
    """A server that runs already may have served other weights under the same version."""
    engines = [VllmEngine(ModelFacts.__new__(ModelFacts), EngineConfig(kind="vllm")) for _ in range(2)]
    assert len({engine.salt(version) for engine in engines for version in (0, 1)}) == 4


async def test_experts_come_before_the_last_part_in_pieces_of_bounded_size(
    world: World, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rillflow_channel, "_EXPERT_BYTES", 24)  # two tokens of three layers, two experts each
    world.llm.experts = chosen_NLK = np.arange(30, dtype=np.uint8).reshape(5, 3, 2)
    world.llm.give(100)
    for more in ({}, {"scored": True}):  # a prompt of three tokens and an answer of three
        found, parts = _Chosen(), []
        _, answer = ask(client, 3, **more)
        while not parts or not (parts[-1].finish or parts[-1].error):
            parts.append(await answer.next())
            found.add(parts[-1])
        assert [len(part.experts) for part in parts if part.experts] == [24, 24, 12]
        assert not any(part.tokens for part in parts if part.experts)
        assert np.array_equal(unpack(found.packed((0, 2), 3)), chosen_NLK[:, [0, 2]].reshape(5, 4))
        with pytest.raises(EngineError, match="of 5 tokens instead of 9"):
            found.packed((0, 2), 7)


def test_a_server_that_returns_no_experts_is_named() -> None:
    with pytest.raises(EngineError, match="no experts") as caught:
        _Chosen().packed((0,), 3)
    assert "--enable-return-routed-experts" in caught.value.hint
