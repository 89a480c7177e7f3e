"""Routes of the rollout manager, for operators and the resource manager. Bodies are JSON.

POST /engines/interrupt  {"reason", "engines"?, "move"?, "seconds"?}
POST /engines/resume     {"reason", "engines"?}
GET  /engines
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rillflow.errors import BadRequest
from rillflow.gateway.sampling.manager import RolloutManager
from rillflow.types.decoding import json_decoder
from rillflow.wire import Service
from rillflow.wire.server import read_body

_BODY = 1 << 20
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Names = Annotated[list[str], msgspec.Meta(max_length=1000)]
Body = TypeVar("Body")


class Interrupt(msgspec.Struct, forbid_unknown_fields=True):
    """Without `engines` it is for all; without `seconds` until it is resumed, or this gateway ends."""

    reason: Reason
    engines: Names | None = None
    move: bool = False
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Resume(msgspec.Struct, forbid_unknown_fields=True):
    reason: Reason
    engines: Names | None = None


def add_engine_routes(service: Service, manager: RolloutManager) -> None:
    async def interrupt(ask: Interrupt) -> None:
        limited = {} if ask.seconds is None else {"seconds": ask.seconds}
        await manager.interrupt(ask.reason, ask.engines, move=ask.move, **limited)

    async def resume(ask: Resume) -> None:
        await manager.resume(ask.reason, ask.engines)

    async def show(request: Request) -> Response:
        return _state(manager)

    service.route("/engines/interrupt", _taking(Interrupt, interrupt, manager), ["POST"], "operator", body=Interrupt)
    service.route("/engines/resume", _taking(Resume, resume, manager), ["POST"], "operator", body=Resume)
    service.route("/engines", show, ["GET"], "reader")


def _taking(
    kind: type[Body], act: Callable[[Body], Awaitable[None]], manager: RolloutManager
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            ask = json_decoder(kind).decode(await read_body(request, _BODY))
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadRequest(f"{request.url.path}: {error}", 'send JSON, such as {"reason": "maintenance"}') from error
        await act(ask)
        return _state(manager)

    return endpoint


def _state(manager: RolloutManager) -> Response:
    return Response(msgspec.json.encode(manager.state()), media_type="application/json")
