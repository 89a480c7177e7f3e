"""The gateway's HTTP service. An agent gets a base URL and a key, and talks to it as to any provider.

The run's token opens every route. A session's key opens that session's routes, by path (`/s/{session}/v1/…`) or by
the key alone (`/v1/…`), and nothing else. Agents are answered in their provider's shape, errors included.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, QueueFull, RillflowError, Unauthorized
from rillflow.gateway import running
from rillflow.gateway.calls import Policy, begin
from rillflow.gateway.dialects import DIALECTS, Dialect, chat
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.keeping import SessionLog
from rillflow.gateway.session import Session, Sessions
from rillflow.wire import Service
from rillflow.wire.server import read_body

JSON = "application/json"


class Gateway(Service):
    """Serves the sessions of one node, by policy. With a `log`, what a session holds outlives this process."""

    def __init__(
        self,
        token: str,
        policies: Mapping[str, Policy],
        defaults: Mapping[str, SamplingConfig],
        *,
        limits: GatewayConfig | None = None,
        clock: Clock | None = None,
        log: SessionLog | None = None,
    ) -> None:
        self.limits = limits or GatewayConfig()
        super().__init__("gateway", token, body_limit=self.limits.body)
        if policies.keys() != defaults.keys():
            raise ConfigError("policies and defaults do not name the same policies")
        self._clock = clock or SystemClock()
        self._policies = dict(policies)
        self._defaults = dict(defaults)
        self._created = int(self._clock.now())
        self.sessions = Sessions(token, self.limits, self._clock, log)
        for dialect in DIALECTS:
            self._agent_route(dialect.PATH, self._asking(dialect), "POST")
        self._agent_route("/v1/models", self._models, "GET")

    def _agent_route(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> None:
        for prefix in ("/s/{session}", ""):
            self.route(f"{prefix}{path}", endpoint, [method])

    # ------------------------------------------------------------ who may do what

    def allowed(self, path: str, presented: str) -> bool:
        if super().allowed(path, presented):
            return True
        session = self.sessions.name_in(presented)
        return bool(session) and path.startswith((f"/s/{session}/", "/v1/"))

    def app(self) -> ASGIApp:
        return _Guard(Starlette(routes=self._routes), self)

    def error_response(self, error: RillflowError, path: str) -> Response:
        """In the shape of the dialect whose path it is; of what is no dialect's, as among our own processes."""
        dialect = _dialect_of(path)
        if dialect is None:
            return super().error_response(error, path)
        headers = {"retry-after": "1"} if isinstance(error, QueueFull) or error.status == 503 else None
        return Response(msgspec.json.encode(dialect.error_body(error)), error.status, headers, JSON)

    def _session(self, request: Request) -> Session:
        """The session that a call belongs to."""
        key, name = presented_key(request.scope), request.path_params.get("session")
        if not hmac.compare_digest(key.encode(), self._token.encode()):
            return self.sessions.of_key(key)
        if name is None:
            raise CallRefused("this route needs a session's own key", status=401)
        return self.sessions.get(name)

    # ------------------------------------------------------------ routes

    async def _models(self, request: Request) -> Response:
        self._session(request)
        data = [
            {"id": name, "object": "model", "created": self._created, "owned_by": "rillflow"} for name in self._policies
        ]
        return Response(msgspec.json.encode({"object": "list", "data": data}), media_type=JSON)

    def _asking(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def ask(request: Request) -> Response:
            session = self._session(request)
            asked = dialect.decode(await read_body(request, self.limits.body), self.limits)
            policy = self._policy(asked.model)
            call = dialect.to_call(asked, self._defaults[asked.model])
            # From here to the running task nothing awaits: a call that was counted in is at work.
            now = self._clock.monotonic()
            number = session.admit(self.limits, now)
            answer = begin(session, policy, call, _call_id(session, number), int(self._clock.now()))
            seconds = session.deadline - now
            if call.live:
                events = dialect.stream(asked, answer, policy.renderer)
                return await running.streamed(answer, events, session, request, seconds, shape=dialect.error_event)
            await running.whole(answer, session, request, seconds)
            return Response(dialect.whole(asked, answer, policy.renderer), media_type=JSON)

        return ask

    def _policy(self, model: str) -> Policy:
        policy = self._policies.get(model)
        if policy is None:
            known = ", ".join(self._policies)
            raise CallRefused(
                f"the model {model!r} does not exist; known models: {known}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return policy


class _Guard:
    """Refuses what no key opens, before anything of its body is read, in the shape that the caller expects."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._gateway.allowed(scope["path"], presented_key(scope)):
            error = Unauthorized("missing or wrong key", "send the session's key as `Authorization: Bearer …`")
            await self._gateway.error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


def presented_key(scope: Scope) -> str:
    """OpenAI clients send a bearer token, Anthropic's an `x-api-key`."""
    key = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1").removeprefix("Bearer ").strip())
        if name == b"x-api-key":
            key = value.decode("latin-1").strip()
    return key


def session_url(base: str, session: str) -> str:
    """The base URL of a session for an OpenAI client."""
    return f"{anthropic_url(base, session)}/v1"


def anthropic_url(base: str, session: str) -> str:
    """The base URL of a session for an Anthropic client, which adds the version itself."""
    return f"{base}/s/{quote(session, safe='')}"


def _dialect_of(path: str) -> Dialect | None:
    if not path.startswith(("/s/", "/v1/")):
        return None
    return next((dialect for dialect in DIALECTS if path.endswith(dialect.PATH)), chat)


def _call_id(session: Session, number: int) -> str:
    return blake2b(f"{session.key}/{number}".encode(), digest_size=12).hexdigest()
