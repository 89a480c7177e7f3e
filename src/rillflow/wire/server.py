"""The server base. Closed by default: loopback, a scoped token on every route, a bound on every head and body.

A service binds each route of its table (`types.routes`) to a handler with `on`: a token of one of the route's scopes
opens it (`wire.tokens`), the body is decoded and validated before the handler sees it, and the handler's result is
encoded. A request without a known token is answered 401, one with a token of another scope 403, before anything of its
body is read. A RillflowError becomes its status and an ErrorBody; anything else becomes a 500 that names the error, is
logged with its traceback and never ends the process.

The handler of a route that waits is cancelled when its client disconnects, so that no lease goes to a client that has
disconnected.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rillflow.errors import BadRequest, DiskFull, RillflowError, RunError, Unauthorized, to_body
from rillflow.types.base import msgpack_decoder
from rillflow.types.routes import JSON, MSGPACK, Route
from rillflow.wire.messages import Request, Response
from rillflow.wire.protocol import Connection, Listener
from rillflow.wire.routing import Common, Gate, Routing, WrongMethod, describe
from rillflow.wire.tokens import Keyring, check_scope

Body = TypeVar("Body")
Reply = TypeVar("Reply")
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)

DEFAULT_BODY_LIMIT = 64 << 20


def error_headers(error: RillflowError) -> dict[str, str]:
    if isinstance(error, WrongMethod):
        return {"allow": ", ".join(error.allowed)}
    return {"retry-after": "1"} if error.status in (429, 503) else {}


def bearer(header: str) -> str:
    """Return the token of an `Authorization` header, empty without one. The case of the scheme does not matter."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Bound(NamedTuple):
    """A served route: its handler, and the bound on concurrent requests."""

    route: Route[Any, Any]
    endpoint: Endpoint
    gate: Gate | None
    seconds: Histogram
    at_work: Gauge


class Service:
    """A named HTTP service with health, metrics, a description of its routes, and those that its owner binds before
    `start`.

    `token` is the run's own token, or, in a process that does not hold it, the digests of the run's tokens.
    """

    def __init__(self, name: str, token: str | Keyring, *, body_limit: int = DEFAULT_BODY_LIMIT) -> None:
        if not token:
            raise RunError(f"the {name} service needs a token", "start it through `rillflow run`")
        self.name = name
        self.registry = CollectorRegistry()
        self.keyring = token if isinstance(token, Keyring) else Keyring.of_run(token)
        self._body_limit = body_limit
        self._routing: Routing[Bound] = Routing()
        self._listener = Listener(name, self._respond)
        self._description: bytes | None = None
        self._requests = Counter(
            "rillflow_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "rillflow_request_seconds", "Time to answer by route", ["route"], registry=self.registry
        )
        self._open = Gauge("rillflow_requests_open", "Requests being answered", ["route"], registry=self.registry)
        self._counters: dict[tuple[str, int], Counter] = {}
        self.on(Common.health, self._health)
        self.raw(Common.metrics, self._metrics)
        self.raw(Common.description, self._describe)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Register a number for Prometheus, read at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(read)

    # ------------------------------------------------------------ routes

    @overload
    def on(self, route: Route[None, Reply], handler: Callable[[], Awaitable[Reply]]) -> None: ...

    @overload
    def on(self, route: Route[Body, Reply], handler: Callable[[Body], Awaitable[Reply]]) -> None: ...

    def on(self, route: Route[Any, Any], handler: Callable[..., Awaitable[Any]]) -> None:
        """Bind a route to the handler that takes its body and returns its reply."""
        decoder = msgpack_decoder(route.body)

        async def take(request: Request) -> Response:
            raw = await request.read(self._body_limit)
            try:
                body = decoder.decode(raw)
            except msgspec.MsgspecError as error:
                hint = f"the body must be a msgpack {route.body.__name__}"
                raise BadRequest(f"{route.path}: {error}", hint) from error
            if route.waits:
                reply = await request.while_connected(lambda: handler(body))
            else:
                reply = await handler(body)
            return Response(msgspec.msgpack.encode(reply), media_type=MSGPACK)

        async def show(request: Request) -> Response:
            return Response(msgspec.msgpack.encode(await handler()), media_type=MSGPACK)

        self.raw(route, take if route.has_body else show)

    def raw(self, route: Route[Any, Any], endpoint: Endpoint, *, gate: Gate | None = None) -> None:
        """Bind a route to an endpoint that reads the raw request. Its metrics and errors are handled like those of
        every other route. `gate` may refuse a request before its body is read."""
        bound = Bound(route, endpoint, gate, self._latency.labels(route.path), self._open.labels(route.path))
        self._routing.add(route.method, route.path, bound)

    def routes(self) -> list[Route[Any, Any]]:
        """The routes that are served, in the order of paths."""
        return sorted((one.route for one in self._routing), key=lambda route: (route.path, route.method))

    def described(self) -> dict[str, Any]:
        """The routes as an OpenAPI document."""
        return describe(self.name, self.routes())

    def error_response(self, error: RillflowError, request: Request) -> Response:
        """Return the response to an error; a service with other dialects overrides this."""
        return Response(msgspec.msgpack.encode(to_body(error)), error.status, error_headers(error), MSGPACK)

    def presented(self, request: Request) -> str:
        """Return the token of a request; a service that takes it from elsewhere too overrides this."""
        return bearer(request.headers.get("authorization", ""))

    def opens(self, path: str, presented: str) -> bool:
        """Return whether `presented`, which is not one of the run's tokens, opens `path`: for a service with other
        keys."""
        return False

    def unauthorized(self) -> Unauthorized:
        return Unauthorized("missing or wrong token", "send a token of the run as `Authorization: Bearer …`")

    # ------------------------------------------------------------ requests

    async def _respond(self, request: Request, connection: Connection) -> None:
        """Answer a request. A request without a valid token is refused before its body is read."""
        begun = perf_counter()
        try:
            bound = self._admitted(request)
        except RillflowError as error:
            await connection.send(request, self.finish(self.error_response(error, request)))
            return
        gate = bound.gate
        if gate is not None and not gate.enter():
            refused = self.error_response(gate.refusal(), request)
            await connection.send(request, self._seen(bound, refused, begun))
            return
        bound.at_work.inc()
        try:
            response = await self._answer(bound.endpoint, request)
            await connection.send(request, self._seen(bound, response, begun))
        finally:
            bound.at_work.dec()
            if gate is not None:
                gate.leave()

    def _admitted(self, request: Request) -> Bound:
        """Return the route of a request whose token opens it."""
        presented = self.presented(request)
        if not self.opens(request.path, presented):
            request.scope = self.keyring.scope_of(presented)
            if request.scope is None:
                raise self.unauthorized()
        bound, request.params = self._routing.find(request.path, request.method)
        if request.scope is not None:
            check_scope(request.scope, bound.route.scopes, request.path)
        return bound

    def _seen(self, bound: Bound, response: Response, begun: float) -> Response:
        bound.seconds.observe(perf_counter() - begun)
        key = (bound.route.path, response.status)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._requests.labels(bound.route.path, str(response.status))
        counter.inc()
        return self.finish(response)

    def finish(self, response: Response) -> Response:
        """Return the response as it is sent; a service that adds headers to all responses overrides this."""
        return response

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        try:
            return await endpoint(request)
        except RillflowError as error:
            if isinstance(error, DiskFull):  # logged here: the client may be on another host, with another log
                log.error("%s: %s", self.name, error)
            return self.error_response(error, request)
        except RecursionError:
            return self.error_response(BadRequest("the body is nested too deeply", "send it flatter"), request)
        except Exception as error:
            log.exception("%s: %s failed", self.name, request.path)
            bug = RillflowError(f"{type(error).__name__}: {error}", f"see the log of {self.name}")
            return self.error_response(bug, request)

    async def _health(self) -> dict[str, str]:
        return {"service": self.name, "status": "ok"}

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _describe(self, request: Request) -> Response:
        if self._description is None:
            self._description = msgspec.json.encode(self.described())
        return Response(self._description, media_type=JSON)

    # ------------------------------------------------------------ life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind and serve; returns the base URL. A port in use is a RunError that says which."""
        listener = _bind(self.name, host, port)
        await self.start_on(listener)
        return f"http://{host}:{listener.getsockname()[1]}"

    async def start_on(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound already."""
        await self._listener.start(listener)

    async def stop(self) -> None:
        await self._listener.stop()


def _bind(name: str, host: str, port: int) -> socket.socket:
    # Only for a socket declared as TCP does asyncio switch Nagle's algorithm off, which delays the second half of
    # every answer until the peer's delayed acknowledgement, 40 ms later.
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
