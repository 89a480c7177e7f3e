"""Any environment as an OpenEnv server: `rillflow environments --serve NAME`.

Closed by default: it listens on loopback, and every route except `/health` needs its token, as a bearer token or as the
first part of the path (`http://host:port/TOKEN`, for clients that send no headers). Episodes, bodies and idle time are
bounded. A WebSocket has its own episode; plain HTTP uses `episode_id`, by default the empty one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from rillflow.contracts import Environment
from rillflow.errors import RillflowError
from rillflow.types import Observation
from rillflow.wire.server import bearer

LARGEST = 1 << 20
EPISODES = 256
IDLE_SECONDS = 600.0
STEP_SECONDS = 120.0
_TEXT = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "action": {"type": "object", "properties": {"action": _TEXT}, "required": ["action"]},
    "observation": {"type": "object", "properties": {"text": _TEXT, "actions": {"type": "array"}}},
    "state": {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}},
}


class Refused(Exception):
    """A client's mistake, with the protocol's code for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Played:
    """One episode of the server."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.id = ""
        self.steps = 0
        self.used = time.monotonic()

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        payload = {key: value for key, value in data.items() if key not in ("seed", "episode_id")}
        seed = data.get("seed") or 0
        if not isinstance(seed, int) or seed < 0:
            raise Refused("VALIDATION_ERROR", "seed must be a whole number from 0")
        self.id, self.steps, self.used = str(data.get("episode_id") or ""), 0, time.monotonic()
        return _told(await asyncio.wait_for(self.environment.reset(payload, seed), STEP_SECONDS))

    async def step(self, data: Any) -> dict[str, Any]:
        action = data.get("action") if isinstance(data, Mapping) else None
        if not isinstance(action, str):
            raise Refused("VALIDATION_ERROR", "an action is an object with the text `action`")
        self.steps, self.used = self.steps + 1, time.monotonic()
        return _told(await asyncio.wait_for(self.environment.step(action), STEP_SECONDS))

    def state(self) -> dict[str, Any]:
        return {"episode_id": self.id, "step_count": self.steps}


def _told(seen: Observation) -> dict[str, Any]:
    shown = {"text": seen.text, "actions": seen.actions, "info": msgspec.to_builtins(seen.info)}
    return {"observation": shown, "reward": seen.reward, "done": seen.done}


class OpenEnvServer:
    """A server that makes an environment for each episode with `make`. `start` returns its URL with the token."""

    def __init__(self, name: str, make: Callable[[], Environment], token: str) -> None:
        self._name, self._make, self._token = name, make, token
        self._episodes: dict[str, Played] = {}
        self._sockets = 0
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/health", self._health)
        for prefix in ("", "/{token}"):
            app.router.add_get(f"{prefix}/metadata", self._guarded(self._metadata))
            app.router.add_get(f"{prefix}/schema", self._guarded(self._schema))
            app.router.add_get(f"{prefix}/state", self._guarded(self._state))
            app.router.add_get(f"{prefix}/ws", self._guarded(self._ws))
            app.router.add_post(f"{prefix}/reset", self._guarded(self._reset))
            app.router.add_post(f"{prefix}/step", self._guarded(self._step))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        listens = self._runner.addresses[0]
        return f"http://{listens[0]}:{listens[1]}/{self._token}"

    async def close(self) -> None:
        await self._runner.cleanup()
        for played in self._episodes.values():
            await played.environment.close()
        self._episodes.clear()

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guard(request: web.Request) -> web.StreamResponse:
            given = request.match_info.get("token") or bearer(request.headers.get("authorization", ""))
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return web.json_response({"detail": "the token is missing or wrong"}, status=401)
            try:
                return await handler(request)
            except Refused as error:
                return web.json_response({"detail": str(error), "code": error.code}, status=422)
            except (RillflowError, TimeoutError) as error:
                return web.json_response({"detail": str(error), "code": "EXECUTION_ERROR"}, status=500)

        return guard

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _metadata(self, _: web.Request) -> web.Response:
        return web.json_response({"name": self._name, "description": f"rillflow environment {self._name}"})

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response(SCHEMA)

    async def _reset(self, request: web.Request) -> web.Response:
        data = await _body(request)
        return web.json_response(await (await self._episode(str(data.get("episode_id") or ""))).reset(data))

    async def _step(self, request: web.Request) -> web.Response:
        data = await _body(request)
        return web.json_response(await self._known(str(data.get("episode_id") or "")).step(data.get("action")))

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self._known(request.query.get("episode_id", "")).state())

    def _known(self, episode: str) -> Played:
        if episode not in self._episodes:
            raise Refused("SESSION_ERROR", "no such episode: reset first")
        return self._episodes[episode]

    async def _episode(self, episode: str) -> Played:
        if episode not in self._episodes:
            await self._end_idle()
            self._check_room()
            self._episodes[episode] = Played(self._make())
        return self._episodes[episode]

    async def _end_idle(self) -> None:
        old = [key for key, played in self._episodes.items() if time.monotonic() - played.used > IDLE_SECONDS]
        for key in old:
            await self._episodes.pop(key).environment.close()

    def _check_room(self) -> None:
        if len(self._episodes) + self._sockets >= EPISODES:
            raise Refused("CAPACITY_REACHED", f"{EPISODES} episodes are open: come back later")

    async def _ws(self, request: web.Request) -> web.StreamResponse:
        await self._end_idle()
        self._check_room()
        socket = web.WebSocketResponse(max_msg_size=LARGEST, heartbeat=60.0, receive_timeout=IDLE_SECONDS)
        await socket.prepare(request)
        self._sockets += 1
        played = Played(self._make())
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT or (answer := await _answered(played, message.data)) is None:
                    break
                await socket.send_json(answer)
        except TimeoutError:
            pass  # the connection was idle for too long
        finally:
            self._sockets -= 1
            await played.environment.close()
        await socket.close()
        return socket


async def _answered(played: Played, text: str) -> dict[str, Any] | None:
    """Return the answer to a message; None ends the connection."""
    try:
        message = json.loads(text)
        return await _obeyed(played, message if isinstance(message, dict) else {})
    except Refused as error:
        return _failed(error.code, str(error))
    except (ValueError, RecursionError) as error:
        return _failed("INVALID_JSON", f"invalid JSON: {error}")
    except (RillflowError, TimeoutError) as error:
        return _failed("EXECUTION_ERROR", str(error))


async def _obeyed(played: Played, message: dict[str, Any]) -> dict[str, Any] | None:
    kind, data = message.get("type"), message.get("data", {})
    if kind == "close":
        return None
    if kind == "state":
        return {"type": "state", "data": played.state()}
    if kind == "reset" and isinstance(data, dict):
        return {"type": "observation", "data": await played.reset(data)}
    if kind == "step":
        return {"type": "observation", "data": await played.step(data)}
    raise Refused("UNKNOWN_TYPE", f"unknown message type: {kind!r:.80}")


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        read = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused("INVALID_JSON", "the body is not JSON") from error
    if not isinstance(read, dict):
        raise Refused("VALIDATION_ERROR", "the body is not an object")
    return read
