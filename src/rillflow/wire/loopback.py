"""ASGI apps of other packages, served on loopback: every call needs the token, and the port is known once it is
open."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from rillflow.errors import RunError
from rillflow.wire.server import bearer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_STARTING = 10.0  # seconds for the port to open
_CONCURRENT = 1024  # connections and requests


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process's owner."""
        yield


@asynccontextmanager
async def served(app: ASGIApp, token: str, port: int, *, what: str) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve `app` until the block is left; yields its URL and the task that serves it. `what` names it in errors."""
    config = uvicorn.Config(
        Guarded(app, token), host="127.0.0.1", port=port, ws="none", log_config=None, access_log=False, lifespan="on",
        timeout_graceful_shutdown=1, limit_concurrency=_CONCURRENT,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(_listen(server, port, what))
    try:
        deadline = asyncio.get_running_loop().time() + _STARTING
        while not server.started and not serving.done():
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(f"{what} did not start within {_STARTING:.0f} s", "see its log")
            await asyncio.sleep(0.02)
        if serving.done():
            serving.result()
            raise RunError(f"{what} ended before it could be used", "see its log")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", serving
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


async def _listen(server: uvicorn.Server, port: int, what: str) -> None:
    try:
        await server.serve()
    except SystemExit:  # so uvicorn says that it could not listen
        raise RunError(f"{what} cannot listen on port {port}", "choose another one, or 0 for any") from None


class Guarded:
    """Lets calls with the token pass."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"give the token: Authorization: Bearer ...\n"})
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(bearer(given[0].decode("latin-1")).encode(), self._token)
