"""The gateway's HTTP service. An agent gets a base URL and a key, and talks to it as to any provider.

A session's key opens that session's routes, by path (`/s/{session}/v1/…`) or by the key alone (`/v1/…`), the
description of all routes, and nothing else. The node's token opens the routes of every session; engines are held with
the operator's. Agents are answered in their provider's shape, errors included; our own processes as everywhere on our
wire.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, RillflowError, Unauthorized
from rillflow.gateway import models, running
from rillflow.gateway.calls import Answer, Call, Policy, begin_beside
from rillflow.gateway.dialects import DIALECTS, Dialect, chat, dialect_of, messages, responses
from rillflow.gateway.dialects.openai import overruled
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.giants import refuse_giants
from rillflow.gateway.routes import ASKING, AgentRoutes, in_session
from rillflow.gateway.sessions.keeping import SessionLog
from rillflow.gateway.sessions.session import Session, Sessions
from rillflow.gateway.texts import SHORT, SHORT_BODY, TextThreads
from rillflow.gateway.trees.continuing import answer_of, following
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.placing import Place
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import TokenTree
from rillflow.types.route import JSON, Route
from rillflow.wire import Service
from rillflow.wire.common_routes import DESCRIPTION, Common
from rillflow.wire.gate import Gate
from rillflow.wire.messages import Request, Response
from rillflow.wire.server import Endpoint, bearer, error_headers
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

AGENT_HEADER = "x-rillflow-agent"
_AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OURS = (Common.health.path, Common.metrics.path)  # of every service, and as there: no provider's shape


class _Asked(NamedTuple):
    """A request of a dialect and what it asks for."""

    request: Any
    call: Call
    policy: Policy


class _Counted(NamedTuple):
    """A prompt whose tokens are to be counted: of the policy `name`, behind the answer `previous` if any."""

    name: str
    policy: Policy
    history: list[Message]
    tools: Tools
    tools_key: bytes
    previous: str | None = None


class Gateway(Service):
    """Serves the sessions of one node, by policy. With a `log`, what a session holds outlives this process.

    Session keys are signed with `token`. Without a `keyring`, `token` is the run's own.
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

    # ------------------------------------------------------------ who may do what

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
        """The session that a request is about: the one that its key opens, or, with a token, its path's."""
        name = request.params.get("session")
        if not self.has_token(request):
            return self.sessions.of_key(presented_key(request))
        if name is None:
            raise CallRefused("this path names no session: send the session's own key, or ask below /s/SESSION")
        return self.sessions.get(name)

    def has_token(self, request: Request) -> bool:
        """Return whether a request was sent with a token of the run, not with a session's key."""
        return self.keyring.scope_of(presented_key(request)) is not None

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
                return await running.streamed(
                    begin,
                    lambda answer: dialect.stream(asked.request, answer, renderer),
                    session,
                    request,
                    self._clock,
                    shape=dialect.error_event,
                )
            answer = await running.whole(begin, session, request, self._clock)
            return Response(dialect.whole(asked.request, answer, renderer), media_type=JSON)

        return ask

    async def _read(self, session: Session, dialect: Dialect, raw: bytes, agent: str) -> _Asked:
        def read() -> _Asked:
            request = dialect.decode(raw, self.limits)
            name, policy = self._fitting(request)
            call = dialect.to_call(request, self._defaults[name])
            _check_tools(call, name, policy)
            return _Asked(request, replace(call, policy=name, agent=agent), policy.with_options(call.options))

        async with session.turn:
            asked = await self._texts.run(read, long=len(raw) > SHORT_BODY)
        if replaced := overruled(asked.request, self._defaults[asked.call.policy]):
            self._tell_overruled(session, replaced)
        return asked

    def _fitting(self, request: Any) -> tuple[str, Policy]:
        """Return the policy that a decoded request asks for, if its context may hold the request's text."""
        name = self._policy_name(request.model)
        policy = self._policies[name]
        refuse_giants(request, policy.renderer, policy.engine.context)
        return name, policy

    def _admit(self, session: Session, asked: _Asked) -> running.Begin:
        """Count a call in, or refuse it. The result must be run before anything is awaited: it is at work then."""
        number = session.admit(self.limits, self._clock.monotonic())
        id, created = _call_id(session, number), int(self._clock.now())

        async def begin() -> Answer:
            async with session.turn:
                return await begin_beside(session, asked.policy, asked.call, id, created, texts=self._texts)

        return begin

    def _tell_overruled(self, session: Session, replaced: str) -> None:
        """Count it, and say it once: an agent that asks for temperature 0 would give groups without variance."""
        session.sampling_overruled += 1
        if not self._told_overruled:
            self._told_overruled = True
            log.warning(
                "an agent asks for %s: the recipe's own sampling is used; `sampling.wins: agent` lets agents choose",
                replaced,
            )

    async def chat(self, name: str, body: bytes, agent: str) -> bytes:
        """The answer of the chat route to an agent in this process, without HTTP and not as a stream. What is refused
        is raised as it is; nothing of the session has changed then."""
        if not self._gate.enter():
            raise self._gate.refusal()
        try:
            session = self.sessions.get(name)
            asked = await self._read(session, chat, body, checked_agent(agent) if agent else "")
            answer = await running.whole(self._admit(session, asked), session, None, self._clock)
            return chat.whole(asked.request, answer, asked.policy.renderer)
        finally:
            self._gate.leave()

    async def _count(self, request: Request) -> Response:
        """How many tokens a call with these messages would be given now. Nothing of the session changes."""
        session, raw = self.session_of(request), await request.read(self.limits.body)

        def read() -> _Counted:
            asked = messages.decode_count(raw, self.limits)
            name, policy = self._fitting(asked)
            history, tools, tools_key = messages.prompt_of(asked)
            options = asked.chat_template_kwargs or {}
            return _Counted(name, policy.with_options(options), history, tools, tools_key)

        counted = await self._counted(session, read, long=len(raw) > SHORT_BODY)
        return _json({"input_tokens": counted})

    async def _count_input(self, request: Request) -> Response:
        """As `_count`, for the responses dialect."""
        session, raw = self.session_of(request), await request.read(self.limits.body)

        def read() -> _Counted:
            asked = responses.decode(raw, self.limits)
            name, policy = self._fitting(asked)
            call = responses.to_call(asked, self._defaults[name])
            policy = policy.with_options(call.options)
            return _Counted(name, policy, call.history, call.tools, call.tools_key, call.previous)

        counted = await self._counted(session, read, long=len(raw) > SHORT_BODY)
        return _json({"object": "response.input_tokens", "input_tokens": counted})

    async def _counted(self, session: Session, read: Callable[[], _Counted], *, long: bool) -> int:
        async with session.turn:
            name, policy, history, tools, key, previous = await self._texts.run(read, long=long)
            whole = history if previous is None else following(session, previous, history)
            tree = session.trees.get(name) or TokenTree()
            place = Place(tree, policy.renderer, whole, tools, key, reading=policy.reading(tools))
            await self._texts.run(place.render, long=place.size > SHORT)
            return place.count()

    async def _response(self, request: Request) -> Response:
        """An answer of the session, as the responses dialect shows it. When it was given is not kept."""
        session = self.session_of(request)
        id = request.params["response"].removeprefix("resp_")
        policy, node = answer_of(session, id, "response_id")
        return _json(responses.kept(id, policy, node, self._created))

    async def _models(self, request: Request) -> Response:
        self.session_of(request)
        return _json(models.listed(request, list(self._names), self._created))

    async def _model(self, request: Request) -> Response:
        self.session_of(request)
        name = request.params["model"]
        self._policy_name(name)
        return _json(models.one(request, name, self._created))

    def _policy_name(self, model: str) -> str:
        """The policy that a request's `model` asks for, by its name or by an alias of it."""
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
    """Refuse tools that the model would never hear of, and calls that nobody could read."""
    if call.tools and policy.tools is None:
        raise CallRefused(
            f"the chat template of {name} has no place for tools: set policies.{name}.tools to the format in which "
            "your instructions ask for calls, or use a model whose template has tools",
            param="tools",
        )


def presented_key(request: Request) -> str:
    """OpenAI clients send a bearer token, Anthropic's an `x-api-key`."""
    header = request.headers.get("authorization")
    return bearer(header) if header is not None else request.headers.get("x-api-key", "").strip()


def agent_of(request: Request) -> str:
    """Return the agent named in the request's `x-rillflow-agent` header, or an empty string."""
    named = request.headers.get(AGENT_HEADER)
    return "" if named is None else checked_agent(named)


def checked_agent(agent: str) -> str:
    if not _AGENT.fullmatch(agent):
        raise CallRefused(
            f"the header {AGENT_HEADER} is no name: use up to 100 letters, digits, dots, dashes and underscores",
            param=AGENT_HEADER,
        )
    return agent


def session_url(base: str, session: str) -> str:
    """The base URL of a session for an OpenAI client."""
    return f"{anthropic_url(base, session)}/v1"


def anthropic_url(base: str, session: str) -> str:
    """The base URL of a session for an Anthropic client, which adds the version itself."""
    return f"{base}/s/{quote(session, safe='')}"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _call_id(session: Session, number: int) -> str:
    return blake2b(f"{session.key}/{number}".encode(), digest_size=12).hexdigest()
