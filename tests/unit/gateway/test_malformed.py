"""Requests that are broken, hostile or merely odd: each is answered as documented, and the gateway goes on serving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from serving import Served, served, until

from raw_http import connected, exchanged
from rillflow.config import GatewayConfig

LIMIT = 1 << 18
USER = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": [USER]},
    "/v1/completions": {"model": "policy", "prompt": "hello"},
    "/v1/responses": {"model": "policy", "input": "hello"},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "policy", "messages": [USER]},
}
PATHS = list(BODIES)


@pytest.fixture
async def bench() -> AsyncIterator[Served]:
    async with served(limits=GatewayConfig(body=LIMIT)) as made:
        yield made
        await until(lambda: made.gateway._gate.at_work == 0)
        made.script("fine")
        status, answer, _ = await made.call("POST", "/v1/chat/completions", json=BODIES["/v1/chat/completions"])
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine")


def request(bench: Served, path: str, head: str = "", body: bytes = b"") -> bytes:
    start = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bench.key}\r\n{head}\r\n"
    return start.encode("latin-1") + body


def sized(bench: Served, path: str, body: bytes) -> bytes:
    return request(bench, path, f"content-length: {len(body)}\r\n", body)


def read(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


async def refused(bench: Served, path: str, body: bytes, status: int = 400) -> str:
    """The message of a refusal that has the shape of the path's provider."""
    got, answer = read(await exchanged(bench.url, sized(bench, path, body)))
    assert got == status, answer
    assert ("type" in answer) == path.startswith("/v1/messages")
    return str(answer["error"]["message"])


def changed(path: str, **change: Any) -> bytes:
    return json.dumps(BODIES[path] | change).encode()


def with_text(path: str, text: bytes) -> bytes:
    """A request in which the user's text is the given JSON, right or wrong."""
    return json.dumps(BODIES[path]).encode().replace(b'"hello"', text)


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_not_json(bench: Served, path: str) -> None:
    whole = json.dumps(BODIES[path]).encode()
    broken = {
        "nothing": b"",
        "truncated": whole[:-1],
        "more behind it": whole + b"}",
        "not UTF-8": with_text(path, b'"\xff\xfe"'),
        "half a character": with_text(path, b'"\xc3"'),
        "an overlong character": with_text(path, b'"\xc0\xaf"'),
        "a surrogate in UTF-8": with_text(path, b'"\xed\xa0\x80"'),
        "a lone surrogate": with_text(path, b'"\\ud800"'),
        "surrogates the wrong way round": with_text(path, b'"\\udc00\\ud800"'),
        "NaN": whole[:-1] + b', "temperature": NaN}',
        "Infinity": whole[:-1] + b', "temperature": -Infinity}',
        "beyond every float": whole[:-1] + b', "temperature": 1e999}',
        "a comment": whole[:-1] + b"/* */}",
        "deep": b"[" * 100_000,
        "deep objects": b'{"a":' * 30_000,
        "deep in an unknown field": whole[:-1] + b', "else": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "another encoding": json.dumps(BODIES[path]).encode("utf-16"),
        "compressed": b"\x1f\x8b\x08\x00\x00",
    }
    if path == "/v1/messages/count_tokens":
        del broken["beyond every float"]  # in a field that is passed over
    for name, body in broken.items():
        assert await refused(bench, path, body), name


@pytest.mark.parametrize("path", PATHS)
async def test_json_that_is_no_request(bench: Served, path: str) -> None:
    for body in (b"null", b"[]", b"3", b'"text"', b"{}", b'{"model": 7}', b'{"model": null}'):
        assert await refused(bench, path, body)
    assert "does not exist" in await refused(bench, path, changed(path, model="m" * 10_000), status=404)


DEPTHS = (50, 200, 900, 5000)


@pytest.mark.parametrize("depth", DEPTHS)
async def test_depth_within_json_is_answered_or_refused(bench: Served, depth: int) -> None:
    """A depth that the decoder accepts may be too much for the template; that must not be a 500."""
    nested = json.loads("[" * 200 + "]" * 200)  # deeper ones are written by hand
    schema = b'{"a":' * depth + json.dumps(nested if depth == 200 else 1).encode() + b"}" * depth
    for path, tool in (
        ("/v1/chat/completions", b'{"type":"function","function":{"name":"f","parameters":%b}}'),
        ("/v1/messages", b'{"name":"f","input_schema":%b}'),
        ("/v1/messages/count_tokens", b'{"name":"f","input_schema":%b}'),
    ):
        body = json.dumps(BODIES[path]).encode()[:-1] + b', "tools": [' + tool % schema + b"]}"
        bench.script("fine")
        status, answer = read(await exchanged(bench.url, sized(bench, path, body)))
        assert status in (200, 400), answer
        bench.engine.scripts.clear()
    used = (
        json.dumps(BODIES["/v1/messages"])
        .encode()
        .replace(
            b'"messages": [',
            b'"messages": [{"role":"assistant","content":[{"type":"tool_use","id":"","name":"f","input":%b}]},',
        )
    )
    bench.script("fine")
    status, answer = read(await exchanged(bench.url, sized(bench, "/v1/messages", used % schema)))
    assert status in (200, 400), answer
    bench.engine.scripts.clear()


@pytest.mark.parametrize("path", PATHS)
async def test_odd_but_right(bench: Served, path: str) -> None:
    """The last of two equal keys counts; the type of content is not asked for; unknown fields are passed over."""
    odd = [
        (json.dumps(BODIES[path]).encode()[:-1] + b', "model": "policy"}', "content-type: application/json\r\n"),
        (with_text(path, b'"\\u0000 \\ud83d\\ude42"'), "content-type: text/plain\r\n"),
        (b" \r\n\t" + json.dumps(BODIES[path]).encode() + b"\n\n", "content-type: multipart/form-data\r\n"),
        (changed(path, extra={"a": [1, None, {"b": "c"}]}), "accept: application/xml\r\n"),
    ]
    for body, head in odd:
        bench.script("fine")
        answer = await exchanged(bench.url, request(bench, path, f"{head}content-length: {len(body)}\r\n", body))
        assert read(answer)[0] == 200, (answer, body)
    bench.engine.scripts.clear()
    last = json.dumps(BODIES[path]).encode()[:-1] + b', "model": "another"}'
    assert "another" in await refused(bench, path, last, status=404)


async def test_a_call_that_the_model_nests_too_deeply_stays_text(bench: Served) -> None:
    arguments = '{"a":' * 900 + "1" + "}" * 900
    said = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    bench.script(said, step=1000)
    tools = [{"name": "f", "input_schema": {}}]
    status, answer, _ = await bench.call("POST", "/v1/messages", json=BODIES["/v1/messages"] | {"tools": tools})
    assert (status, answer["content"]) == (200, [{"type": "text", "text": said}])


BIG = 10**30


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/chat/completions", {"seed": BIG}),
        ("/v1/chat/completions", {"seed": -BIG}),
        ("/v1/chat/completions", {"top_k": BIG}),
        ("/v1/chat/completions", {"n": BIG}),
        ("/v1/chat/completions", {"max_tokens": BIG}),
        ("/v1/chat/completions", {"temperature": 1e308}),
        ("/v1/completions", {"seed": BIG}),
        ("/v1/completions", {"prompt": [BIG]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [10**9]}),
        ("/v1/responses", {"max_output_tokens": BIG}),
        ("/v1/messages", {"max_tokens": BIG}),
        ("/v1/messages", {"top_k": BIG}),
    ],
)
async def test_giant_numbers(bench: Served, path: str, change: dict[str, Any]) -> None:
    bench.script("fine")
    status, answer = read(await exchanged(bench.url, sized(bench, path, changed(path, **change))))
    assert status in (200, 400), answer
    assert status == 200 or answer["error"]["message"]
    bench.engine.scripts.clear()


# ---------------------------------------------------------------- bodies on their way


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_past_the_limit(bench: Served, path: str) -> None:
    message = await refused(bench, path, b" " * (LIMIT + 1), status=413)
    assert str(LIMIT) in message
    declared = request(bench, path, f"content-length: {1 << 50}\r\nexpect: 100-continue\r\n")
    assert read(await exchanged(bench.url, declared))[0] == 413
    chunked = b"%x\r\n%b\r\n" % (LIMIT, b" " * LIMIT) + b"1\r\n \r\n0\r\n\r\n"
    answer = await exchanged(bench.url, request(bench, path, "transfer-encoding: chunked\r\n", chunked))
    assert read(answer)[0] == 413


async def test_a_body_that_is_exactly_as_large_as_it_may_be(bench: Served) -> None:
    path = "/v1/messages/count_tokens"
    whole = json.dumps(BODIES[path]).encode()
    assert read(await exchanged(bench.url, sized(bench, path, whole.ljust(LIMIT))))[0] == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_stops_coming(bench: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.messages.BODY_SECONDS", 0.1)
    async with connected(bench.url) as line:
        line.send(request(bench, path, "content-length: 1000\r\n", b'{"model": '))
        status, answer = read(await line.answer())
    assert status == 408
    assert "took longer" in answer["error"]["message"]


async def test_a_body_that_drips(bench: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.messages.BODY_SECONDS", 0.3)
    async with connected(bench.url) as line:
        line.send(request(bench, "/v1/messages", "content-length: 100000\r\n"))
        answer = asyncio.create_task(line.answer())
        for _ in range(500):
            if answer.done():
                break
            line.send(b" ")
            await asyncio.sleep(0.01)
        assert read(await answer)[0] == 408


async def test_a_body_whose_sender_goes(bench: Served) -> None:
    async with connected(bench.url) as line:
        line.send(request(bench, "/v1/messages", "content-length: 1000\r\n", b'{"model": "policy"'))
        await until(lambda: bench.gateway._gate.at_work == 1)
    await until(lambda: bench.gateway._gate.at_work == 0)
    assert bench.engine.requests == []


async def test_without_a_key_no_body_is_read(bench: Served) -> None:
    wrong = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
    answer = await exchanged(bench.url, wrong)
    assert read(answer)[0] == 401
    assert b"100 Continue" not in answer


async def test_keys_that_are_no_keys(bench: Served) -> None:
    for value in (
        b"Bearer \xff\xfe",
        b"Bearer " + b"a" * 60_000,
        b"Bearer .",
        b"Bearer ..",
        b"\x80",
        b"Basic YTpi",
        b"",
    ):
        head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nauthorization: " + value + b"\r\ncontent-length: 0\r\n\r\n"
        assert read(await exchanged(bench.url, head))[0] == 401
    giant = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + b"a" * 70_000 + b"\r\n\r\n"
    assert b" 400 " in await exchanged(bench.url, giant)


async def test_paths_that_are_no_paths(bench: Served) -> None:
    for path in (
        "/s/s1/v1/messages/../../..",
        "/s/s1/v1/%2e%2e/x",
        "/s/s1//v1/messages",
        "/s/s1/v1/messages%00",
        "/v1/",
    ):
        assert read(await exchanged(bench.url, sized(bench, path, b"{}")))[0] == 404
    for path in ("/s/%2e%2e/v1/messages", "/s/s2/v1/messages", "//v1/messages", "/s/%ff/v1/messages", "*"):
        answer = await exchanged(bench.url, sized(bench, path, b"{}"))
        assert answer.split(b" ")[1] in (b"400", b"401"), path
