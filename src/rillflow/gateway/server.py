"""The gateway's HTTP service. An agent gets a base URL and a key, and uses it like any provider.

A session's key opens that session's routes, by path (`/s/{session}/v1/…`) or by the key alone (`/v1/…`), and the
description of all routes. The node's token opens the routes of every session; the operator's token holds engines.
Agents get answers and errors in the shape of their provider; other routes answer like all our services.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, RillflowError, Unauthorized
from rillflow.gateway import lifetime
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import SHORT, SHORT_BODY, Call, Policy, TextThreads, begin_in_thread, refuse_too_long
from rillflow.gateway.dialects import (
    ASKING,
    DIALECTS,
    AgentRoutes,
    Dialect,
    chat,
    dialect_of,
    in_session,
    listed_models,
    messages,
    responses,
    shown_model,
)
from rillflow.gateway.dialects.openai import overruled
from rillflow.gateway.sessions.events import SessionLog
from rillflow.gateway.sessions.session import Session, Sessions
from rillflow.gateway.shapes import CallRefused, CountAnswer, ResponsesCount
from rillflow.gateway.trees.matching import Place, answer_of, following
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import TokenTree
from rillflow.types.routes import JSON, Route
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response
from rillflow.wire.routing import DESCRIPTION, Common, Gate
from rillflow.wire.server import Endpoint, bearer, error_headers
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

AGENT_HEADER = "x-rillflow-agent"
_AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OURS = (Common.health.path, Common.metrics.path)  # routes of every service, without a provider's shape


class _Asked(NamedTuple):
    """A decoded request of a dialect, its call and its policy."""

    request: Any
    call: Call
    policy: Policy


class _Counted(NamedTuple):
    """A prompt whose tokens are counted: of the policy `name`, after the answer `previous` if that is given."""

    name: str
    policy: Policy
    history: list[Message]
    tools: Tools
    tools_key: bytes
    previous: str | None = None


class Gateway(Service):
    """Serves the sessions of one node. With a `log`, sessions survive this process.

    Session keys are signed with `token`. Without a `keyring`, `token` is also the token of the run.
    """

    def __init__(
        self,
        token: str,
        policies: Mapping[str, Policy],
        defaults: Mapping[str, SamplingConfig],
        *,
        limits: GatewayConfig | None = None,
        clock: Clock | None = None,
        log: SessionLog | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.limits = limits or GatewayConfig()
        super().__init__("gateway", keyring or token, body_limit=self.limits.body)
        if policies.keys() != defaults.keys():
            raise ConfigError("policies and defaults do not name the same policies")
        if not policies.keys() >= set(self.limits.aliases.values()):
            raise ConfigError("an alias names a policy that the gateway does not serve")
        self._clock = clock or SystemClock()
        self._policies = dict(policies)
        self._defaults = dict(defaults)
        self._told_overruled = False
        self._names = {name: name for name in policies} | self.limits.aliases
        self._created = int(self._clock.now())
        self._gate = Gate(self.limits.total, "calls of this gateway")
        self._texts = TextThreads()
        self.sessions = Sessions(token, self.limits, self._clock, log)
        self.gauge("rillflow_gateway_sessions", "Sessions that are open", lambda: len(self.sessions))
        self.gauge("rillflow_gateway_calls", "Model calls that are being answered", lambda: self._gate.at_work)
        self._bind_routes()

    def _bind_routes(self) -> None:
        for dialect in DIALECTS:
            self._agent_route(ASKING[dialect.PATH], self._asking(dialect), self._gate)
        self._agent_route(AgentRoutes.count, self._count, self._gate)
        self._agent_route(AgentRoutes.count_input, self._count_input, self._gate)
        self._agent_route(AgentRoutes.response, self._response)
        self._agent_route(AgentRoutes.models, self._models)
        self._agent_route(AgentRoutes.model, self._model)

    def _agent_route(self, route: Route[Any, Any], endpoint: Endpoint, gate: Gate | None = None) -> None:
        self.raw(in_session(route), endpoint, gate=gate)
        self.raw(route, endpoint, gate=gate)

    # ------------------------------------------------------------ keys and tokens

    def presented(self, request: Request) -> str:
        return presented_key(request)

    def opens(self, path: str, presented: str) -> bool:
        session = self.sessions.name_in(presented)
        return bool(session) and (path.startswith((f"/s/{session}/", "/v1/")) or path == DESCRIPTION)

    def unauthorized(self) -> Unauthorized:
        return Unauthorized(
            "missing or wrong key", "send the session's key as `Authorization: Bearer …` or `x-api-key`"
        )

    def session_of(self, request: Request) -> Session:
        """Return the session of a request: that of its key, or with a token that of its path."""
        name = request.params.get("session")
        if request.scope is None:
            return self.sessions.of_key(presented_key(request))
        if name is None:
            raise CallRefused("this path has no session: send the session's own key, or use /s/SESSION")
        return self.sessions.get(name)

    def error_response(self, error: RillflowError, request: Request) -> Response:
        if request.path.startswith(OURS):
            return super().error_response(error, request)
        body = dialect_of(request).error_body(error)
        return Response(msgspec.json.encode(body), error.status, error_headers(error), JSON)

    # ------------------------------------------------------------ routes

    def _asking(self, dialect: Dialect) -> Endpoint:
        async def ask(request: Request) -> Response:
            session = self.session_of(request)
            raw = await request.read(self.limits.body)
            asked = await self._read(session, dialect, raw, agent_of(request))
            begin = self._admit(session, asked)
            renderer = asked.policy.renderer
            if asked.call.live:
                return await lifetime.streamed(
                    begin,
                    lambda answer: dialect.stream(asked.request, answer, renderer),
                    session,
                    request,
                    self._clock,
                    shape=dialect.error_event,
                )
            answer = await lifetime.whole(begin, session, request, self._clock)
            return Response(dialect.whole(asked.request, answer, renderer), media_type=JSON)

        return ask

    async def _read(self, session: Session, dialect: Dialect, raw: bytes, agent: str) -> _Asked:
        def read() -> _Asked:
            request = dialect.decode(raw, self.limits)
            name, policy = self._fitting(request, raw)
            call = dialect.to_call(request, self._defaults[name])
            _check_tools(call, name, policy)
            call = msgspec.structs.replace(call, policy=name, agent=agent)
            return _Asked(request, call, policy.with_options(call.options))

        async with session.turn:
            asked = await self._texts.run(read, long=len(raw) > SHORT_BODY)
        if replaced := overruled(asked.request, self._defaults[asked.call.policy]):
            self._tell_overruled(session, replaced)
        return asked

    def _fitting(self, request: Any, raw: bytes) -> tuple[str, Policy]:
        """Return the policy of a request that was decoded from `raw`. Raises ContextOverflow if it cannot fit."""
        name = self._policy_name(request.model)
        policy = self._policies[name]
        refuse_too_long(request, len(raw), policy.renderer, policy.engine.context)
        return name, policy

    def _admit(self, session: Session, asked: _Asked) -> lifetime.Begin:
        """Count a call, or refuse it, and return the function that begins it. Call that before anything is awaited."""
        number = session.admit(self.limits, self._clock.monotonic())
        id, created = _call_id(session, number), int(self._clock.now())

        async def begin() -> Answer:
            async with session.turn:
                return await begin_in_thread(session, asked.policy, asked.call, id, created, texts=self._texts)

        return begin

    def _tell_overruled(self, session: Session, replaced: str) -> None:
        """Count a call whose sampling parameters were replaced, and log the first one."""
        session.sampling_overruled += 1
        if not self._told_overruled:
            self._told_overruled = True
            log.warning(
                "an agent asked for %s, but the recipe's sampling is used; `sampling.wins: agent` lets agents choose",
                replaced,
            )

    async def chat(self, name: str, body: bytes, agent: str) -> bytes:
        """Answer a chat request of an agent in this process, without HTTP and not as a stream.

        A refusal is raised as it is; the session has not changed then.
        """
        if not self._gate.enter():
            raise self._gate.refusal()
        try:
            session = self.sessions.get(name)
            asked = await self._read(session, chat, body, checked_agent(agent) if agent else "")
            answer = await lifetime.whole(self._admit(session, asked), session, None, self._clock)
            return chat.whole(asked.request, answer, asked.policy.renderer)
        finally:
            self._gate.leave()

    async def _count(self, request: Request) -> Response:
        """Return how many tokens the prompt of these messages would have now. The session does not change."""
        session, raw = self.session_of(request), await request.read(self.limits.body)

        def read() -> _Counted:
            asked = messages.decode_count(raw, self.limits)
            name, policy = self._fitting(asked, raw)
            history, tools, tools_key = messages.prompt_of(asked)
            options = asked.chat_template_kwargs or {}
            return _Counted(name, policy.with_options(options), history, tools, tools_key)

        counted = await self._counted(session, read, long=len(raw) > SHORT_BODY)
        return _json(CountAnswer(counted))

    async def _count_input(self, request: Request) -> Response:
        """Return the same for the responses dialect."""
        session, raw = self.session_of(request), await request.read(self.limits.body)

        def read() -> _Counted:
            asked = responses.decode(raw, self.limits)
            name, policy = self._fitting(asked, raw)
            call = responses.to_call(asked, self._defaults[name])
            policy = policy.with_options(call.options)
            return _Counted(name, policy, call.history, call.tools, call.tools_key, call.previous)

        counted = await self._counted(session, read, long=len(raw) > SHORT_BODY)
        return _json(ResponsesCount(counted))

    async def _counted(self, session: Session, read: Callable[[], _Counted], *, long: bool) -> int:
        async with session.turn:
            name, policy, history, tools, key, previous = await self._texts.run(read, long=long)
            whole = history if previous is None else following(session.trees, previous, history)
            tree = session.trees.get(name) or TokenTree()
            place = Place(tree, policy.renderer, whole, tools, key, reading=policy.reading(tools))
            await self._texts.run(place.render, long=place.size > SHORT)
            return place.count()

    async def _response(self, request: Request) -> Response:
        """Return an answer of the session in the responses dialect. Its time is not kept."""
        session = self.session_of(request)
        id = request.params["response"].removeprefix("resp_")
        policy, node = answer_of(session.trees, id, "response_id")
        return _json(responses.kept(id, policy, node, self._created))

    async def _models(self, request: Request) -> Response:
        self.session_of(request)
        return _json(listed_models(request, list(self._names), self._created))

    async def _model(self, request: Request) -> Response:
        self.session_of(request)
        name = request.params["model"]
        self._policy_name(name)
        return _json(shown_model(request, name, self._created))

    def _policy_name(self, model: str) -> str:
        """Return the policy of a request's `model`, which is its name or an alias."""
        name = self._names.get(model)
        if name is None:
            known = ", ".join(self._names)
            raise CallRefused(
                f"the model {model[:100]!r} does not exist; known models: {known}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return name

    async def stop(self) -> None:
        await super().stop()
        self._texts.close()


def _check_tools(call: Call, name: str, policy: Policy) -> None:
    """Refuse tools that the model would never see and whose calls could not be read."""
    if call.tools and policy.tools is None:
        raise CallRefused(
            f"the chat template of {name} has no place for tools: set policies.{name}.tools to the format in which "
            "your instructions ask for calls, or use a model whose template has tools",
            param="tools",
        )


def presented_key(request: Request) -> str:
    """Return the key of a request: OpenAI clients send a bearer token, Anthropic's an `x-api-key`."""
    header = request.headers.get("authorization")
    return bearer(header) if header is not None else request.headers.get("x-api-key", "").strip()


def agent_of(request: Request) -> str:
    """Return the agent named in the request's `x-rillflow-agent` header, or an empty string."""
    named = request.headers.get(AGENT_HEADER)
    return "" if named is None else checked_agent(named)


def checked_agent(agent: str) -> str:
    if not _AGENT.fullmatch(agent):
        raise CallRefused(
            f"the header {AGENT_HEADER} must be a name of up to 100 letters, digits, dots, dashes and underscores",
            param=AGENT_HEADER,
        )
    return agent


def session_url(base: str, session: str) -> str:
    """Return the base URL of a session for an OpenAI client."""
    return f"{anthropic_url(base, session)}/v1"


def anthropic_url(base: str, session: str) -> str:
    """Return the base URL of a session for an Anthropic client, which adds the version itself."""
    return f"{base}/s/{quote(session, safe='')}"


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _call_id(session: Session, number: int) -> str:
    return blake2b(f"{session.key}/{number}".encode(), digest_size=12).hexdigest()
