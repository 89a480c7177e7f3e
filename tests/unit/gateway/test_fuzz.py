"""Requests made up from the gateway's own description, right and wrong ones, over real HTTP.

No input makes a 5xx, every status is a documented one, every answer has the shape that was promised for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import pytest
from gateway_support import chunk, make_renderer
from hypothesis import HealthCheck, Phase, given, seed, settings
from serving import TOKEN, add_control

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.gateway import Gateway, Policy
from rillflow.gateway.dialects.openai import Distortions
from rillflow.gateway.shapes import CallRefused
from rillflow.types import Chunk, GenerateRequest
from rillflow.wire import LoopThread
from soak import repetitions

if TYPE_CHECKING:  # imported by the fixture: every worker collects this module, and one runs it
    from schemathesis import Case

Form = Literal["positive", "negative"]
LIMITS = GatewayConfig(body=1 << 16, messages=8, tools=4, choices=4, stops=4, tokens=4096)
# Fields that would be refused most often.
ANSWERED = {"model": "policy", "max_tokens": 3, "top_k": 2, "prompt": "hello"} | dict.fromkeys(
    Distortions.__struct_fields__
)
CALLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class Quick:
    """A token source that answers a few tokens at once, which depend on the request."""

    context = 2048

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        start = sum(request.tokens[-4:]) % 200
        yield chunk([start, start + 1, start + 2][: request.sampling.max_tokens], finish="stop")


class Target:
    """A gateway in a thread of its own, with a session that is a fresh one for each operation: some of them end it."""

    def __init__(self, thread: LoopThread) -> None:
        import schemathesis
        from schemathesis import checks

        self._thread = thread
        self._checks = (
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_headers_conformance,
            checks.response_schema_conformance,
        )
        self.gateway: Gateway = thread.run(self._make(), 10)
        self.url = thread.run(self.gateway.start(), 10)
        self.renew()
        self.operations = [
            result.ok() for result in schemathesis.openapi.from_dict(self._described()).get_all_operations()
        ]

    async def _make(self) -> Gateway:
        gateway = Gateway(
            TOKEN, {"policy": Policy(Quick(), make_renderer())}, {"policy": SamplingConfig()}, limits=LIMITS
        )
        add_control(gateway)
        return gateway

    def renew(self) -> None:
        self.key = self._thread.run(self._open(), 10)

    async def _open(self) -> str:
        with suppress(CallRefused):
            self.gateway.sessions.close("s1")
        return self.gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=3600)

    def _described(self) -> dict[str, Any]:
        return self.gateway.described()

    def send(self, case: Case) -> int:
        """Play one case, hold its answer to the description, and return its status."""
        path = case.operation.path
        if "session" in case.path_parameters:
            case.path_parameters["session"] = "s1"
        key = self.key if path.startswith(("/s/", "/v1/")) else TOKEN
        response = case.call(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=20)
        case.validate_response(response, checks=self._checks)
        return int(response.status_code)

    def close(self) -> None:
        self._thread.run(self.gateway.stop(), 10)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    thread = LoopThread("fuzz")
    made = Target(thread)
    yield made
    made.close()
    thread.close()


def fuzz(target: Target, examples: int, form: Form, *, answered: bool) -> dict[str, set[int]]:
    """Return the statuses of each operation over `examples` cases."""
    seen = {}
    for operation in target.operations:
        # A session's routes without its name have the same behind them.
        target.renew()
        wanted = examples if operation.body and not operation.path.startswith("/v1/") else 1
        seen[operation.path] = play(target, operation, wanted, form, answered=answered)
    return seen


def play(target: Target, operation: Any, examples: int, form: Form, *, answered: bool) -> set[int]:
    from schemathesis import GenerationMode

    statuses = set()

    @seed(4)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(form)))
    def one(case: Case) -> None:
        if answered and isinstance(case.body, dict):
            case.body |= {name: value for name, value in ANSWERED.items() if name in case.body}
        statuses.add(target.send(case))

    one()
    return statuses


def test_requests_of_the_described_form(target: Target) -> None:
    seen = fuzz(target, 3, "positive", answered=True)
    assert 200 in set().union(*(seen["/s/{session}" + path] for path in CALLS))


def test_requests_of_another_form(target: Target) -> None:
    seen = fuzz(target, 2, "negative", answered=False)
    assert all(seen["/s/{session}" + path] <= {400, 404} for path in CALLS), seen


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("answered", repetitions([True], [True, False]))
@pytest.mark.parametrize("form", ["positive", "negative"])
def test_many_requests(target: Target, form: Form, answered: bool) -> None:
    seen = fuzz(target, repetitions(12, 80), form, answered=answered)
    if answered and form == "positive":
        assert all(200 in seen["/s/{session}" + path] for path in CALLS), seen
