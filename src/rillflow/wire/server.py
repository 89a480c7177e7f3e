"""The server base. Closed by default: loopback, a bearer token on every route, a bound on every head and body.

A service adds routes with `post(path, handler, Body)`: the body is decoded and validated into `Body` before the
handler sees it, and whatever the handler returns is encoded. A RillflowError becomes its status and an ErrorBody;
anything else becomes a 500 that names the error, is logged with its traceback and never ends the process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rillflow.errors import BadRequest, RillflowError, RunError, Unauthorized, to_body
from rillflow.wire.protocol import BoundedHttp

Body = TypeVar("Body")
log = logging.getLogger(__name__)

MSGPACK = "application/msgpack"
DEFAULT_BODY_LIMIT = 64 << 20
BODY_SECONDS = 60.0


def error_response(error: RillflowError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return Response(msgspec.msgpack.encode(to_body(error)), error.status, headers, MSGPACK)


class TokenGuard:
    """Refuses every request without the run's token, before anything of its body is read."""

    def __init__(self, app: ASGIApp, allowed: Callable[[str, str], bool]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope["path"], _presented_token(scope)):
            error = Unauthorized("missing or wrong token", "send the run's token as `Authorization: Bearer …`")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _presented_token(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1").removeprefix("Bearer ").strip())
    return ""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or BadRequest as soon as it passes the limit, stops coming or loses its sender."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise BadRequest(f"body is larger than {limit} bytes", "send less at once")
                parts.append(part)
    except TimeoutError as error:
        raise BadRequest(f"the body took longer than {BODY_SECONDS:.0f} s", "send it faster, or less") from error
    except ClientDisconnect as error:
        raise BadRequest("the client has gone before its body was whole") from error
    return b"".join(parts)


class Service:
    """A named HTTP service with health, metrics, and the routes that its owner adds before `start`."""

    def __init__(self, name: str, token: str, *, body_limit: int = DEFAULT_BODY_LIMIT) -> None:
        if not token:
            raise RunError(f"the {name} service needs a token", "start it through `rillflow run`, or give --token")
        self.name = name
        self.registry = CollectorRegistry()
        self._token = token
        self._body_limit = body_limit
        self._routes: list[Route] = []
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._requests = Counter(
            "rillflow_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "rillflow_request_seconds", "Time to answer by route", ["route"], registry=self.registry
        )
        self.get("/health", self._health)
        self._routes.append(Route("/metrics", self._metrics, methods=["GET"]))

    # ------------------------------------------------------------ routes

    def post(self, path: str, handler: Callable[[Body], Awaitable[Any]], body: type[Body]) -> None:
        """A route whose msgpack body is validated as `body` before `handler` runs."""
        decoder = msgspec.msgpack.Decoder(body)

        async def endpoint(request: Request) -> Response:
            raw = await read_body(request, self._body_limit)
            try:
                value = decoder.decode(raw)
            except msgspec.MsgspecError as error:
                raise BadRequest(f"{path}: {error}", f"the body must be a msgpack {body.__name__}") from error
            return Response(msgspec.msgpack.encode(await handler(value)), media_type=MSGPACK)

        self.route(path, endpoint, ["POST"])

    def get(self, path: str, handler: Callable[[], Awaitable[Any]]) -> None:
        async def endpoint(request: Request) -> Response:
            return Response(msgspec.msgpack.encode(await handler()), media_type=MSGPACK)

        self.route(path, endpoint, ["GET"])

    def route(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], methods: list[str]) -> None:
        """A raw route, measured and with errors answered like every other."""

        async def answered(request: Request) -> Response:
            with self._latency.labels(path).time():
                response = await self._answer(endpoint, request)
            self._requests.labels(path, str(response.status_code)).inc()
            return response

        self._routes.append(Route(path, answered, methods=methods))

    def error_response(self, error: RillflowError, path: str) -> Response:
        """How an error of `path` is answered; a service with other dialects overrides this."""
        return error_response(error)

    def allowed(self, path: str, presented: str) -> bool:
        """Whether `presented` opens `path`; a service with more than the run's token overrides this."""
        return hmac.compare_digest(presented.encode(), self._token.encode())

    async def _answer(self, endpoint: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        try:
            return await endpoint(request)
        except RillflowError as error:
            return self.error_response(error, request.url.path)
        except Exception as error:
            log.exception("%s: %s failed", self.name, request.url.path)
            return self.error_response(
                RillflowError(f"{type(error).__name__}: {error}", f"see the log of {self.name}"), request.url.path
            )

    async def _health(self) -> dict[str, str]:
        return {"service": self.name, "status": "ok"}

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------ life

    def app(self) -> ASGIApp:
        return TokenGuard(Starlette(routes=self._routes), self.allowed)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind and serve; returns the base URL. A port in use is a RunError that says which."""
        listener = _bind(self.name, host, port)
        config = uvicorn.Config(
            self.app(),
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        # Signals belong to the process's owner, not to uvicorn.
        self._server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"{self.name}-http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RunError(f"the {self.name} service ended while starting", "see its log")
            await asyncio.sleep(0.005)
        return f"http://{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def _bind(name: str, host: str, port: int) -> socket.socket:
    # Named as TCP in so many words: only then does asyncio switch Nagle's algorithm off, which holds the second half
    # of every answer back until the peer's delayed acknowledgement, 40 ms later.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise RunError(
            f"the {name} service cannot listen on {host}:{port}: {error.strerror}",
            "another program holds this port: choose another one, or 0 for any free port",
        ) from error
    return listener
