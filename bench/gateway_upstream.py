"""The upstream of `bench.gateway`: an HTTP server that gives one fixed answer after a fixed time, as lean as can be.

It speaks OpenAI chat completions (for the bare measurement and for LiteLLM) and the engine protocol (for our gateway),
whole and in parts, on one port. Started as a process: it prints its port and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools

from rillflow.engine.remote import Frame, encode
from rillflow.types import Chunk

LATENCY = 0.050
PARTS = 4  # of a streamed answer, evenly over the latency
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Answers:
    """The answers, made once: ids and log-probs for callers of an engine, text for chats."""

    def __init__(self, ids: list[int], texts: list[str]) -> None:
        size = len(ids) // PARTS
        parts = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert len(parts) == len(texts) == PARTS
        octets = _HEAD % b"application/octet-stream" + b"transfer-encoding: chunked\r\n\r\n"
        self.engine = [octets + chunked(_frame(ids, last=True)) + b"0\r\n\r\n"]
        self.engine_parts = [chunked(_frame(part, last=at == PARTS - 1)) for at, part in enumerate(parts)]
        self.engine_parts[0] = octets + self.engine_parts[0]
        self.engine_parts[-1] += b"0\r\n\r\n"
        body = _completion("".join(texts), len(ids))
        self.chat = [_HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body]
        self.chat_parts = [chunked(_event({"content": text})) for text in texts]
        events = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
        self.chat_parts[0] = events + chunked(_event({"role": "assistant", "content": ""})) + self.chat_parts[0]
        self.chat_parts[-1] += chunked(_event({}, "stop")) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.status = _HEAD % b"application/msgpack" + b"content-length: 0\r\n\r\n"


def _frame(ids: list[int], *, last: bool) -> bytes:
    logprobs = [-0.5] * len(ids)
    chunk = Chunk(tokens=ids, logprobs=logprobs, raw_logprobs=logprobs, version=1, finish="stop" if last else None)
    return encode(Frame(chunk=chunk))


def _completion(text: str, tokens: int) -> bytes:
    said = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": said, "finish_reason": "stop"}],
            "usage": usage,
        }
    ).encode()


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    whole = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "policy",
        "choices": [choice],
    }
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """One keep-alive connection. An engine's caller does not say whether it streams: its path's host name does."""

    def __init__(self, answers: Answers, loop: asyncio.AbstractEventLoop) -> None:
        self._answers = answers
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        parts = self._parts()
        step = LATENCY / len(parts)
        for number, part in enumerate(parts):
            self._loop.call_later(step * (number + 1), self._send, part)

    def _parts(self) -> list[bytes]:
        if self._path.endswith(b"/generate"):
            return self._answers.engine_parts if self._path.startswith(b"/parts") else self._answers.engine
        body = b"".join(self._body)
        return self._answers.chat_parts if b'"stream":true' in body.replace(b" ", b"") else self._answers.chat

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def main(ids: list[int], texts: list[str]) -> None:
    loop = asyncio.get_running_loop()
    answers = Answers(ids, texts)
    server = await loop.create_server(lambda: Connection(answers, loop), "127.0.0.1", 0, backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    asyncio.run(main(asked["ids"], asked["texts"]))
