"""The gateway's HTTP service. An agent gets a base URL and a key, and talks to it as to any provider.

The run's token opens every route. A session's key opens that session's routes, by path (`/s/{session}/v1/…`) or by
the key alone (`/v1/…`), and nothing else. Agents are answered in their provider's shape, errors included.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rillflow.config import SamplingConfig
from rillflow.contracts import Clock, Engine, SystemClock
from rillflow.errors import ConfigError, RillflowError, Unauthorized
from rillflow.gateway import running
from rillflow.gateway.calls import Policy, begin
from rillflow.gateway.dialects import chat, openai
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.limits import GatewayLimits
from rillflow.gateway.render import Renderer
from rillflow.gateway.session import Session, Sessions
from rillflow.wire import Service
from rillflow.wire.server import read_body


class Gateway(Service):
    """Serves the sessions of one node. The mappings are by policy and have the same names."""

    def __init__(
        self,
        token: str,
        engines: Mapping[str, Engine],
        renderers: Mapping[str, Renderer],
        defaults: Mapping[str, SamplingConfig],
        *,
        limits: GatewayLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits or GatewayLimits()
        super().__init__("gateway", token, body_limit=self.limits.body)
        if not engines.keys() == renderers.keys() == defaults.keys():
            raise ConfigError("engines, renderers and defaults do not name the same policies")
        self._clock = clock or SystemClock()
        self._policies = {name: Policy(engine, renderers[name]) for name, engine in engines.items()}
        self._defaults = dict(defaults)
        self._created = int(self._clock.now())
        self.sessions = Sessions(token, self.limits, self._clock)
        for prefix in ("/s/{session}", ""):
            self.route(f"{prefix}/v1/chat/completions", self._chat, ["POST"])
            self.route(f"{prefix}/v1/models", self._models, ["GET"])

    # ------------------------------------------------------------ who may do what

    def allowed(self, path: str, presented: str) -> bool:
        if super().allowed(path, presented):
            return True
        session = self.sessions.name_in(presented)
        return bool(session) and path.startswith((f"/s/{session}/v1/", "/v1/"))

    def app(self) -> ASGIApp:
        return _Guard(Starlette(routes=self._routes), self)

    def error_response(self, error: RillflowError, path: str) -> Response:
        return openai.error_response(error) if _is_agent(path) else super().error_response(error, path)

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
        return Response(msgspec.json.encode({"object": "list", "data": data}), media_type=openai.JSON)

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        asked = chat.decode(await read_body(request, self.limits.body), self.limits)
        policy = self._policy(asked.model)
        call = chat.to_call(asked, self._defaults[asked.model])
        # From here to the running task nothing awaits: a call that was counted in is at work.
        now = self._clock.monotonic()
        number = session.admit(self.limits, now)
        answer = begin(session, policy, call, _call_id(session, number), int(self._clock.now()))
        seconds = session.deadline - now
        if call.live:
            events = chat.stream(asked, answer, policy.renderer)
            return await running.streamed(answer, events, session, request, seconds, shape=_error_event)
        await running.whole(answer, session, request, seconds)
        return Response(chat.completion(asked, answer, policy.renderer), media_type=openai.JSON)

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
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1").removeprefix("Bearer ").strip())
    return ""


def session_url(base: str, session: str) -> str:
    """The base URL of a session for an OpenAI client."""
    return f"{base}/s/{quote(session, safe='')}/v1"


def _is_agent(path: str) -> bool:
    return path.startswith(("/s/", "/v1/"))


def _call_id(session: Session, number: int) -> str:
    return blake2b(f"{session.key}/{number}".encode(), digest_size=12).hexdigest()


def _error_event(error: RillflowError) -> bytes:
    return openai.event(openai.error_body(error))
