"""The server base. Closed by default: loopback, a scoped token on every route, a bound on every head and body.

A service adds routes with `post(path, handler, Body, scope)`: a token of that scope opens it (`wire.tokens`), the body
is decoded and validated into `Body` before the handler sees it, and whatever the handler returns is encoded. A request
without a known token is answered 401, one with a token of another scope 403. A RillflowError becomes its status and an
ErrorBody; anything else becomes a 500 that names the error, is logged with its traceback and never ends the process.

A handler whose body has a `wait` is a long poll: it is cancelled when its client disconnects, so that nothing is given
to a client that has gone. A streaming response watches for that itself, with `disconnected`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any, TypeVar

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rillflow.errors import BadRequest, DiskFull, RillflowError, RunError, Unauthorized, to_body
from rillflow.types import TokenScope
from rillflow.types.decoding import msgpack_decoder
from rillflow.wire.gate import Gate
from rillflow.wire.protocol import IDLE_SECONDS, BoundedHttp, Link
from rillflow.wire.routing import Route, Routes, WrongMethod
from rillflow.wire.tokens import Keyring, check_scope

Body = TypeVar("Body")
Reply = TypeVar("Reply")
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)

MSGPACK = "application/msgpack"
DEFAULT_BODY_LIMIT = 64 << 20
BODY_SECONDS = 60.0


def error_response(error: RillflowError) -> Response:
    return Response(msgspec.msgpack.encode(to_body(error)), error.status, error_headers(error), MSGPACK)


def error_headers(error: RillflowError) -> dict[str, str]:
    if isinstance(error, WrongMethod):
        return {"allow": ", ".join(error.allowed)}
    return {"retry-after": "1"} if error.status in (429, 503) else {}


def bearer_token(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bearer(value.decode("latin-1"))
    return ""


def bearer(header: str) -> str:
    """Return the token of an `Authorization` header, empty without one. The case of the scheme does not matter."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or BadRequest as soon as it is known to pass the limit, stops coming or loses its sender."""
    declared = next((value for name, value in request.scope["headers"] if name == b"content-length"), b"")
    if len(declared) > 18 or (declared.isdigit() and int(declared) > limit):
        raise _too_long(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _received(request.receive, limit)
    except TimeoutError as error:
        raise _refused(408, f"the body took longer than {BODY_SECONDS:.0f} s", "send it faster, or less") from error


async def _received(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client has gone before its body was whole")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_long(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if parts[1:] else part


async def disconnected(receive: Receive) -> None:
    """Wait until the client of a request has gone. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(scope: Scope, work: Callable[[], Awaitable[Reply]]) -> Reply:
    """Return the result of `work()`, which is cancelled when the client disconnects; the error is a 499 then."""
    link: Link = scope.get("extensions", {}).get("rillflow", {}).get("link") or Link()
    task = asyncio.current_task()
    assert task is not None, "in the task of a request"
    if link.is_lost():
        raise _gone()
    link.on_lost = task.cancel
    try:
        return await work()
    except asyncio.CancelledError:
        if not link.is_lost():
            raise
        task.uncancel()
        raise _gone() from None
    finally:
        link.on_lost = lambda: None


def _gone() -> BadRequest:
    return _refused(499, "the client has gone", "nothing was done for it")


def _too_long(limit: int) -> BadRequest:
    return _refused(413, f"the body is larger than {limit} bytes", "send less at once")


def _refused(status: int, message: str, hint: str) -> BadRequest:
    error = BadRequest(message, hint)
    error.status = status
    return error


class Service:
    """A named HTTP service with health, metrics, and the routes that its owner adds before `start`.

    `token` is the run's own, or the digests of the tokens that a process knows which has not got it.
    """

    def __init__(self, name: str, token: str | Keyring, *, body_limit: int = DEFAULT_BODY_LIMIT) -> None:
        if not token:
            raise RunError(f"the {name} service needs a token", "start it through `rillflow run`")
        self.name = name
        self.registry = CollectorRegistry()
        self.keyring = token if isinstance(token, Keyring) else Keyring.of_run(token)
        self._body_limit = body_limit
        self._routes = Routes()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._requests = Counter(
            "rillflow_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "rillflow_request_seconds", "Time to answer by route", ["route"], registry=self.registry
        )
        self._open = Gauge("rillflow_requests_open", "Requests being answered", ["route"], registry=self.registry)
        self.get("/health", self._health, "reader")
        self.route("/metrics", self._metrics, ["GET"], "reader")

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A number for Prometheus, read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(read)

    # ------------------------------------------------------------ routes

    def post(self, path: str, handler: Callable[[Body], Awaitable[Any]], body: type[Body], *scopes: TokenScope) -> None:
        """A route whose msgpack body is validated as `body` before `handler` runs. A body with a `wait` is a long poll:
        its handler is cancelled when the client disconnects."""
        waits = "wait" in getattr(body, "__struct_fields__", ())
        decoder = msgpack_decoder(body)

        async def endpoint(request: Request) -> Response:
            raw = await read_body(request, self._body_limit)
            try:
                value = decoder.decode(raw)
            except msgspec.MsgspecError as error:
                raise BadRequest(f"{path}: {error}", f"the body must be a msgpack {body.__name__}") from error
            if waits:
                reply = await while_connected(request.scope, lambda: handler(value))
            else:
                reply = await handler(value)
            return Response(msgspec.msgpack.encode(reply), media_type=MSGPACK)

        self.route(path, endpoint, ["POST"], *scopes, body=body, waits=waits)

    def get(self, path: str, handler: Callable[[], Awaitable[Any]], *scopes: TokenScope) -> None:
        async def endpoint(request: Request) -> Response:
            return Response(msgspec.msgpack.encode(await handler()), media_type=MSGPACK)

        self.route(path, endpoint, ["GET"], *scopes)

    def route(
        self,
        path: str,
        endpoint: Endpoint,
        methods: list[str],
        *scopes: TokenScope,
        gate: Gate | None = None,
        body: type | None = None,
        waits: bool = False,
    ) -> None:
        """A raw route, measured and with errors answered like every other; a request that `gate` bounds may be
        refused before anything of its body is read. `body` and `waits` are for the route table (`routing.Route`)."""
        latency, open_now = self._latency.labels(path), self._open.labels(path)
        counters: dict[int, Counter] = {}

        def seen(response: Response, begun: float) -> Response:
            latency.observe(perf_counter() - begun)
            status = response.status_code
            if status not in counters:
                counters[status] = self._requests.labels(path, str(status))
            counters[status].inc()
            return response

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            begun = perf_counter()
            if gate is not None and not gate.enter():
                refused = self.error_response(gate.refusal(), scope)
                await seen(refused, begun)(scope, receive, send)
                return
            open_now.inc()
            try:
                response = await self._answer(endpoint, Request(scope, receive, send))
                await seen(response, begun)(scope, receive, send)
            finally:
                open_now.dec()
                if gate is not None:
                    gate.leave()

        for method in methods:
            self._routes.add(Route(method, path, scopes, answered, body, waits))

    def routes(self) -> list[Route]:
        """The route table, in the order of paths."""
        return sorted(self._routes, key=lambda route: (route.path, route.method))

    def error_response(self, error: RillflowError, scope: Scope) -> Response:
        """How an error of a request is answered; a service with other dialects overrides this."""
        return error_response(error)

    def presented(self, scope: Scope) -> str:
        """The token that a request brings; a service that takes it from elsewhere too overrides this."""
        return bearer_token(scope)

    def opens(self, path: str, presented: str) -> bool:
        """Whether `presented`, which is none of the run's tokens, opens `path`: for a service that has other keys."""
        return False

    def unauthorized(self) -> Unauthorized:
        return Unauthorized("missing or wrong token", "send a token of the run as `Authorization: Bearer …`")

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        try:
            return await endpoint(request)
        except RillflowError as error:
            if isinstance(error, DiskFull):  # here: who asked may be on another host, in another log
                log.error("%s: %s", self.name, error)
            return self.error_response(error, request.scope)
        except RecursionError:
            return self.error_response(BadRequest("the body is nested too deeply", "send it flatter"), request.scope)
        except Exception as error:
            log.exception("%s: %s failed", self.name, request.url.path)
            bug = RillflowError(f"{type(error).__name__}: {error}", f"see the log of {self.name}")
            return self.error_response(bug, request.scope)

    async def _health(self) -> dict[str, str]:
        return {"service": self.name, "status": "ok"}

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------ life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The service as an ASGI application. What no token opens is refused before anything of its body is read."""
        assert scope["type"] == "http", scope["type"]
        path, presented = scope["path"], self.presented(scope)
        try:
            held = self.keyring.scope_of(presented)
            if held is None and not self.opens(path, presented):
                raise self.unauthorized()
            route, scope["path_params"] = self._routes.find(path, scope["method"])
            if held is not None:
                check_scope(held, route.scopes, path)
        except RillflowError as error:
            await self.error_response(error, scope)(scope, receive, send)
            return
        await route.app(scope, receive, send)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind and serve; returns the base URL. A port in use is a RunError that says which."""
        listener = _bind(self.name, host, port)
        await self.start_on(listener)
        return f"http://{host}:{listener.getsockname()[1]}"

    async def start_on(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound already."""
        config = uvicorn.Config(
            self,
            http=BoundedHttp,
            ws="none",
            interface="asgi3",
            timeout_keep_alive=IDLE_SECONDS,
            log_config=None,
            access_log=False,
            proxy_headers=False,
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
