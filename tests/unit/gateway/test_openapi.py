"""The description of the routes: complete, true to what requests are decoded into, and closed without a key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from serving import TOKEN, Served, add_control, served

from rillflow.errors import BadRequest, ContextOverflow, DiskFull, EngineError, QueueFull, Unauthorized, Unavailable


@pytest.fixture
async def bench() -> AsyncIterator[Served]:
    async with served(prepare=add_control) as made:
        yield made


def routes(bench: Served) -> list[tuple[str, str]]:
    return [(route.method, route.path) for route in bench.gateway.routes()]


async def test_every_route_is_described(bench: Served) -> None:
    status, described, _ = await bench.call("GET", "/openapi.json")
    assert (status, described["openapi"]) == (200, "3.1.0")
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(routes(bench))
    assert {"/v1/messages", "/s/{session}/v1/chat/completions", "/s/{session}/reward", "/engines", "/feed"} <= {
        path for _, path in found
    }


async def test_every_status_that_a_call_may_end_with_is_described(bench: Served) -> None:
    _, described, _ = await bench.call("GET", "/openapi.json")
    mine = {BadRequest, ContextOverflow, DiskFull, EngineError, QueueFull, Unauthorized, Unavailable}
    statuses = described["paths"]["/v1/messages"]["post"]["responses"]
    assert {str(error.status) for error in mine} <= set(statuses)


async def test_every_reference_leads_somewhere(bench: Served) -> None:
    _, described, _ = await bench.call("GET", "/openapi.json")
    references = re.findall(r"#/components/schemas/(\w+)", str(described))
    assert set(references) == set(described["components"]["schemas"])


async def test_what_is_described_is_what_is_decoded(bench: Served) -> None:
    _, described, _ = await bench.call("GET", "/openapi.json")
    asked = described["components"]["schemas"]["MessagesRequest"]
    assert sorted(asked["required"]) == ["max_tokens", "messages", "model"]
    operation = described["paths"]["/v1/messages"]["post"]
    answers = operation["responses"]["200"]["content"]
    assert list(answers) == ["application/json", "text/event-stream"]
    assert operation["responses"]["429"]["headers"]["Retry-After"]
    assert [schemes["type"] for schemes in described["components"]["securitySchemes"].values()] == ["http", "apiKey"]


async def test_every_route_refuses_a_missing_or_wrong_key(bench: Served) -> None:
    for method, path in routes(bench):
        for key in ("", "wrong", "s1.00.00"):
            status, _, _ = await bench.call(method, path.replace("{session}", "s1"), key=key)
            assert status == 401, (method, path)


async def test_a_sessions_key_opens_its_own_routes_only(bench: Served) -> None:
    opened = {
        path for method, path in routes(bench) if (await bench.call(method, path.replace("{session}", "s1")))[0] != 401
    }
    assert opened == {path for _, path in routes(bench) if path.startswith(("/s/{session}/", "/v1/", "/openapi.json"))}


async def test_unknown_routes_and_methods_have_a_providers_shape(bench: Served) -> None:
    status, answer, _ = await bench.call("POST", "/v1/embeddings", json={})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, headers = await bench.call("GET", "/v1/messages")
    assert (status, answer["type"], headers["allow"]) == (405, "error", "POST")
    status, answer, _ = await bench.call("GET", "/v1/nothing", headers={"anthropic-version": "2023-06-01"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert (await bench.call("GET", "/nothing", key=TOKEN))[0] == 404
