"""What one client with prompts of four megabytes does to the streams of the others.

    python -m bench.responsive [--quick] [--json FILE]

The gateway runs in a process of its own, with the tiny policy's tokenizer and chat template and an engine that gives
each stream one token every 50 ms. 64 sessions stream from it, and the time between two tokens is measured where they
arrive. Then the same beside a client in a third process that sends one text of four megabytes after the other, each
different: as the text of a message, as the arguments of a tool call, to `count_tokens`. The context is of a million
tokens, so that no text is refused by its length: each is read, rendered and tokenised whole, and then found to be too
long. In the last case the context is usual, and the texts are refused by their length.

Rows are medians over rounds. The goal is of the p99 beside the client less the p99 without: at most 100 ms.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import httptools

from bench.common import Report, parser
from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.gateway import Gateway, Policy, Renderer
from rillflow.types import Chunk, GenerateRequest

STREAMS, STEP = 64, 0.05
TOKENS = 40  # of one answer: then the next call of the session
BYTES = 4 << 20
LIMIT = 100.0  # ms
SETTLE = 1.0  # seconds that are not measured, after a process has started or ended
CONTEXTS = {"policy": 1 << 20, "usual": 32_768}
LIMITS = GatewayConfig(body=2 * BYTES, session_bytes=1 << 40, calls=1 << 30)
_SPAWN = multiprocessing.get_context("spawn")


class Form(NamedTuple):
    """One way to send a long text."""

    name: str
    path: str
    model: str = "policy"


FORMS = (
    Form("message", "/v1/chat/completions"),
    Form("tool arguments", "/v1/chat/completions"),
    Form("count_tokens", "/v1/messages/count_tokens"),
    Form("message, refused", "/v1/chat/completions", "usual"),
)


# ---------------------------------------------------------------- the gateway


class Paced:
    """An engine that samples one token every `STEP` seconds for each call."""

    def __init__(self, context: int, token: int) -> None:
        self.context = context
        self._chunk = Chunk(tokens=[token], logprobs=[-0.5], raw_logprobs=[-0.5], version=1)
        self._last = Chunk(tokens=[token], logprobs=[-0.5], raw_logprobs=[-0.5], version=1, finish="length")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for _ in range(request.sampling.max_tokens - 1):
            await asyncio.sleep(STEP)
            yield self._chunk
        await asyncio.sleep(STEP)
        yield self._last


def serve(told: Connection) -> None:
    """Serve until the process is ended; tell the port and the keys of the sessions."""

    async def work() -> None:
        renderer = Renderer.load("tiny")
        (token,) = renderer.encode("a")
        gateway = Gateway(
            "token",
            {name: Policy(Paced(context, token), renderer) for name, context in CONTEXTS.items()},
            {name: SamplingConfig() for name in CONTEXTS},
            limits=LIMITS,
        )
        url = await gateway.start()
        names = [f"session-{number}" for number in range(STREAMS + 1)]
        keys = [gateway.sessions.open(name, seed=1, group=name, deadline_seconds=1e6) for name in names]
        told.send((int(url.rpartition(":")[2]), keys))
        await asyncio.Event().wait()

    asyncio.run(work())


# ---------------------------------------------------------------- the client with long texts


def words() -> str:
    drawn = random.Random(7)
    known = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(2000)]
    return " ".join(drawn.choices(known, k=BYTES // 5))[: BYTES - 1000]


def body(form: Form, text: str) -> bytes:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count."}]
    if form.name == "tool arguments":
        function = {"name": "count", "arguments": json.dumps({"text": text})}
        called = {"id": "call", "type": "function", "function": function}
        messages += [{"role": "assistant", "content": "", "tool_calls": [called]}]
        messages += [{"role": "tool", "tool_call_id": "call", "content": "1"}]
    else:
        messages[0]["content"] = text
    return json.dumps({"model": form.model, "messages": messages, "max_tokens": 1}).encode()


def send(port: int, key: str, form: Form, first: int, *, told: Connection, stop: Event) -> None:
    """Send one long text after the other until the test stops; report the start, and at the end the seconds of each."""
    text = words()
    told.send([])
    took: list[float] = []
    for number in count(first):
        if stop.is_set():
            break
        data = body(form, f"{number} {text}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        started = time.perf_counter()
        connection.request("POST", form.path, data, {"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        said = response.read()
        assert response.status == (200 if form.name == "count_tokens" else 400), said[:500]
        took.append(time.perf_counter() - started)
        connection.close()
    told.send(took)


# ---------------------------------------------------------------- the streams


class Stream(asyncio.Protocol):
    """One session's connection: its calls follow each other, and the times between tokens are kept."""

    def __init__(self, request: bytes, gaps: list[float]) -> None:
        self._request = request
        self._gaps = gaps
        self._last: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._last = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        now = time.perf_counter()
        for _ in range(data.count(b'"content":"a"')):
            if self._last is not None:
                self._gaps.append(now - self._last)
            self._last = now

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        asyncio.get_running_loop().call_soon(self._ask)


def request_bytes(port: int, key: str) -> bytes:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "Say a."}], "stream": True}
    data = json.dumps(asked | {"max_tokens": TOKENS}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Streams:
    """Run all sessions at once; `measure` returns the times between tokens during `seconds`."""

    def __init__(self, port: int, keys: list[str]) -> None:
        self._port = port
        self._keys = keys
        self._gaps: list[float] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for key in self._keys:
            made = partial(Stream, request_bytes(self._port, key), self._gaps)
            await loop.create_connection(made, "127.0.0.1", self._port)

    async def measure(self, seconds: float) -> dict[str, float]:
        self._gaps.clear()
        await asyncio.sleep(seconds)
        if len(self._gaps) < 100:
            return {"p50": seconds * 1e3, "p99": seconds * 1e3, "worst": seconds * 1e3}
        points = statistics.quantiles(self._gaps, n=100)
        return {"p50": points[49] * 1e3, "p99": points[98] * 1e3, "worst": max(self._gaps) * 1e3}


class Sender:
    """The process of the client with long texts."""

    def __init__(self, port: int, key: str, form: Form, first: int) -> None:
        self._heard, told = _SPAWN.Pipe()
        self._stop = _SPAWN.Event()
        self._process = _SPAWN.Process(
            target=send, args=(port, key, form, first), kwargs={"told": told, "stop": self._stop}, daemon=True
        )
        self._process.start()
        told.close()

    async def begun(self) -> None:
        await asyncio.to_thread(self._heard.recv)

    async def end(self) -> list[float]:
        """Return the seconds of all its requests once the last one is answered."""
        self._stop.set()
        took: list[float] = await asyncio.to_thread(self._heard.recv)
        await asyncio.to_thread(self._process.join)
        return took


async def compare(report: Report, port: int, keys: list[str], *, seconds: float, rounds: int) -> None:
    streams = Streams(port, keys[1:])
    await streams.start()
    found: dict[str, list[dict[str, float]]] = {}
    took: dict[str, list[float]] = {form.name: [] for form in FORMS}
    for turn in range(rounds):
        for place, form in enumerate(FORMS):
            await streams.measure(SETTLE)
            found.setdefault(f"{form.name}: without", []).append(await streams.measure(seconds))
            sender = Sender(port, keys[0], form, 1000 * (turn * len(FORMS) + place))
            await sender.begun()
            await streams.measure(SETTLE)
            found.setdefault(f"{form.name}: beside", []).append(await streams.measure(seconds))
            took[form.name] += await sender.end()
            for name in ("without", "beside"):
                print(f"{form.name}: {name} {found[f'{form.name}: {name}'][-1]}", file=sys.stderr)
    for form in FORMS:
        without, beside = (_medians(found[f"{form.name}: {name}"]) for name in ("without", "beside"))
        for point in ("p50", "p99", "worst"):
            name = f"{form.name}: {point} between tokens"
            report.add(name, beside[point], without[point], unit="ms (peer: without)", less_is_better=True)
        report.add(f"{form.name}: p99 added", beside["p99"] - without["p99"], None, unit="ms", limit=LIMIT)
        report.add(f"{form.name}: a text of 4 MB takes", statistics.median(took[form.name]), None, unit="s")


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    report = Report("responsive")
    ours, theirs = _SPAWN.Pipe()
    gateway = _SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    gateway.start()
    try:
        port, keys = ours.recv()
        asyncio.run(compare(report, port, keys, seconds=6.0 if given.quick else 10.0, rounds=1 if given.quick else 2))
    finally:
        gateway.kill()
        gateway.join()
    report.finish(given.json)


if __name__ == "__main__":
    main()
