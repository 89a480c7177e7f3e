"""Binds the routes of the rollout manager to a service: hold engines, let them go on, show them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from rillflow.errors import BadRequest
from rillflow.gateway.routes import EngineControlRoutes, Interrupt, Resume
from rillflow.gateway.sampling.manager import RolloutManager
from rillflow.types.decoding import json_decoder
from rillflow.types.route import JSON
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response

_BODY = 1 << 20
Body = TypeVar("Body")


def add_engine_routes(service: Service, manager: RolloutManager) -> None:
    async def interrupt(ask: Interrupt) -> None:
        limited = {} if ask.seconds is None else {"seconds": ask.seconds}
        await manager.interrupt(ask.reason, ask.engines, move=ask.move, **limited)

    async def resume(ask: Resume) -> None:
        await manager.resume(ask.reason, ask.engines)

    async def show(request: Request) -> Response:
        return _state(manager)

    service.raw(EngineControlRoutes.interrupt, _taking(Interrupt, interrupt, manager))
    service.raw(EngineControlRoutes.resume, _taking(Resume, resume, manager))
    service.raw(EngineControlRoutes.engines, show)


def _taking(
    kind: type[Body], act: Callable[[Body], Awaitable[None]], manager: RolloutManager
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            ask = json_decoder(kind).decode(await request.read(_BODY))
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadRequest(f"{request.path}: {error}", 'send JSON, such as {"reason": "maintenance"}') from error
        await act(ask)
        return _state(manager)

    return endpoint


def _state(manager: RolloutManager) -> Response:
    return Response(msgspec.json.encode(manager.state()), media_type=JSON)
